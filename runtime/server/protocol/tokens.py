"""The bodies of POST /tokenize and /detokenize, as vLLM has them."""

from typing import Any

from pydantic import Field

from trtllm_lite.runtime.server.protocol.common import TokenId
from trtllm_lite.runtime.server.protocol.strict import Strict


class TokenizeRequest(Strict):
    """One of prompt (llama.cpp calls it content) and messages."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="null is true for a prompt; a rendered conversation has its own"
    )
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """Token ids, special ones included."""

    model: str | None = None
    tokens: list[TokenId]
