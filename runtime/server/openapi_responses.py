"""What /v1/responses answers, as types. See `openapi_replies`."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from trtllm_lite.runtime.server.openapi_replies import CachedTokens, ReasoningTokens, TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """A part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    """What the model says."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """What the model thinks first."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(BaseModel):
    """A call that the model asks for. `arguments` is JSON as text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputTokens(CachedTokens):
    """Input tokens in detail. Nothing is written to the cache on request."""

    cache_write_tokens: int = Field(ge=0)


class ResponseUsage(BaseModel):
    """Tokens."""

    input_tokens: int = Field(ge=0)
    input_tokens_details: InputTokens
    output_tokens: int = Field(ge=0)
    output_tokens_details: ReasoningTokens
    total_tokens: int = Field(ge=0)


class ResponseFault(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is cut short."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """The answer, with what the request said."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage | None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any] | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    background: Literal[False]
    max_tool_calls: None
    previous_response_id: None
    service_tier: str
    store: Literal[False]
    truncation: Literal["disabled"]


class ResponseEvent(BaseModel):
    """An event of a streamed response. Its further fields are those of its type in OpenAI's
    reference; the event's own name is the type too."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int = Field(ge=0)
