"""What the routes answer, as types: for the document that describes them, not for making answers.

Fields without a default are always there. Those made with `sometimes` are left out when there is
nothing to say.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls"]


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


def sometimes(description: str | None = None) -> Any:
    """A field that may be left out."""
    return Field(default=None, description=description, json_schema_extra=_without_default)


class ErrorDetail(BaseModel):
    """One line for people, and what programs can tell errors apart by."""

    message: str
    type: str = Field(
        description="invalid_request_error, authentication_error, unavailable_error or server_error"
    )
    param: str | None = Field(description="the field of the request that is wrong")
    code: str | None


class ErrorReply(BaseModel):
    """Any answer that is not 200, of any route."""

    error: ErrorDetail


class CachedTokens(BaseModel):
    """Prompt tokens in detail."""

    cached_tokens: int = Field(ge=0, description="taken from prefixes of earlier requests")


class ReasoningTokens(BaseModel):
    """Output tokens in detail."""

    reasoning_tokens: int = Field(ge=0)


class Usage(BaseModel):
    """Tokens over all prompts and choices."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = sometimes("of chat, once it has ended")


class TopLogprob(BaseModel):
    """One token and the logarithm of its probability, before sampling parameters."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of every token of the text."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(BaseModel):
    """`arguments` is JSON as text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The answer of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = sometimes("what a reasoning model thinks first")
    tool_calls: list[ToolCall] = sometimes()


class ChatChoice(BaseModel):
    """One of the n answers."""

    index: int = Field(ge=0)
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="the stop string or token that ended it")


class Head(BaseModel):
    """What the parts of one answer repeat."""

    id: str
    created: int = Field(description="Unix seconds")
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    """The answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionCallDelta(BaseModel):
    """The name comes once; arguments come in pieces."""

    name: str = sometimes()
    arguments: str


class ToolCallDelta(BaseModel):
    """A piece of the call of that index."""

    index: int = Field(ge=0)
    id: str = sometimes()
    type: Literal["function"] = sometimes()
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    """What is new."""

    role: Literal["assistant"] = sometimes()
    content: str = sometimes()
    reasoning_content: str = sometimes()
    tool_calls: list[ToolCallDelta] = sometimes()


class ChatChunkChoice(BaseModel):
    """A piece of the choice of that index."""

    index: int = Field(ge=0)
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = sometimes()


class ChatCompletionChunk(Head):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = sometimes("only with stream_options")


class CompletionLogprobs(BaseModel):
    """Lists of one length. The first token of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """Choice i of prompt p has index p * n + i."""

    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class Completion(Head):
    """The answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(BaseModel):
    """What is new of that choice."""

    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


class CompletionChunk(Head):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = sometimes("only with stream_options")
