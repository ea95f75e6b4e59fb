"""What /v1/messages answers, as types. See `openapi_replies`."""

from typing import Any, Literal

from pydantic import BaseModel, Field

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesErrorDetail(BaseModel):
    """One line for people, and the kind of error."""

    type: str
    message: str


class MessagesError(BaseModel):
    """Any answer of these routes that is not 200."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


class TextReply(BaseModel):
    """What the model says."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingReply(BaseModel):
    """What the model thinks first."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseReply(BaseModel):
    """A call that the model asks for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(BaseModel):
    """Output tokens in detail."""

    thinking_tokens: int = Field(ge=0)


class MessageUsage(BaseModel):
    """Tokens. Those taken from the prefix cache are no input_tokens."""

    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    output_tokens_details: ThinkingTokens
    cache_read_input_tokens: int = Field(ge=0)
    cache_creation_input_tokens: int = Field(ge=0)


class MessageObject(BaseModel):
    """The answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextReply | ThinkingReply | ToolUseReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """An event of a streamed message. Its further fields are those of its type in Anthropic's
    reference; the event's own name is the type too."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class TokenCount(BaseModel):
    """Of the prompt."""

    input_tokens: int = Field(ge=0)
