"""The body of POST /v1/completions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, Tag

from trtllm_lite.runtime.sampling_params import INT64
from trtllm_lite.runtime.server.protocol.common import (
    Refused,
    Sampling,
    TokenId,
    TopLogprobs,
)
from trtllm_lite.runtime.server.protocol.forms import one_of

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
_FORMS: Mapping[type, str] = MappingProxyType({str: "texts", int: "ids", list: "lists"})


def prompt_form(value: object) -> str | None:
    """None for a list of several kinds of things. Emptiness is told later."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    kinds = {type(each) for each in value} or {str}
    return _FORMS.get(kinds.pop()) if len(kinds) == 1 else None


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[TokenId], Tag("ids")]
    | Annotated[list[TokenIds], Tag("lists")],
    one_of(
        prompt_form, "a string, a list of strings, a list of token ids, or a list of such lists"
    ),
]


class CompletionRequest(Sampling):
    """Field by field as OpenAI and vLLM have them."""

    prompt: Prompt = Field(description="a text, token ids, or a list of either")
    max_tokens: int | None = Field(
        None, ge=0, le=INT64 - 1, description="null is 16; 0 only with echo"
    )
    echo: bool | None = Field(None, description="the prompt's text comes first")
    logprobs: TopLogprobs | None = Field(
        None, description="alternatives per token; with echo, of the prompt's too"
    )


COMPLETION_REFUSED: Mapping[str, Refused] = {
    "suffix": Refused("not supported: filling in the middle", ("",)),
}
