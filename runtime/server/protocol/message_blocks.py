"""`messages` and `system` of POST /v1/messages: texts, or lists of blocks."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from trtllm_lite.runtime.server.protocol.forms import one_of, text_or_list
from trtllm_lite.runtime.server.protocol.strict import Strict


class TextBlock(Strict):
    """Text. Its cache_control and citations have no effect."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """What the model thought, where the chat template shows it to the model again."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Strict):
    """Reasoning that only another server can read: left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=64)
    input: dict[str, Any]


Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextBlock], Tag("list")],
    one_of(text_or_list, "a string or a list of blocks of type text"),
]


class ToolResultBlock(Strict):
    """What a call gave. With `is_error` the model reads "Error: " in front of it."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Block], Tag("list")],
    one_of(text_or_list, "a string or a list of blocks"),
]


class InputMessage(Strict):
    """One turn, or a part of one: neighbours of the same role are one turn. A system message holds
    text alone."""

    role: Literal["user", "assistant", "system"]
    content: Content
