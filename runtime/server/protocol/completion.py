"""The body of POST /v1/completions."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from trtllm_lite.runtime.sampling_params import INT64
from trtllm_lite.runtime.server.protocol.common import (
    Refused,
    Sampling,
    TokenId,
    TopLogprobs,
)

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = str | list[str] | list[TokenId] | list[TokenIds]


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
