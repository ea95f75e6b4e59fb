"""`input` of POST /v1/responses: a text, or the items that a conversation is made of."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from trtllm_lite.runtime.server.protocol.forms import one_of, text_or_list
from trtllm_lite.runtime.server.protocol.strict import Strict


class TextPart(Strict):
    """Text. What a response says of it beside the text (annotations, logprobs) may come back with
    it, and has no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Strict):
    """What the model said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class Thought(Strict):
    """One piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("list")],
    one_of(text_or_list, "a string or a list of parts"),
]


class MessageItem(Strict):
    """A turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Strict):
    """A call that the model made. `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=64)
    arguments: str


class FunctionOutputItem(Strict):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: Content


class ReasoningItem(Strict):
    """What the model thought: `content`, or else `summary`, where the chat template shows the
    model its earlier reasoning. What is encrypted is left out."""

    type: Literal["reasoning"]
    summary: list[Thought] | None = None
    content: list[Thought] | None = None


def item_type(value: object) -> str | None:
    """The type of an item; a message need not say it."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None:
        return "message"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(item_type),
]
Items = Annotated[list[Item], Field(min_length=1)]
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Items, Tag("list")],
    one_of(text_or_list, "a string or a list of items"),
]
