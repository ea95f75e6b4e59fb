"""The bodies of POST /tokenize and /detokenize, as vLLM has them."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trtllm_lite.runtime.server.protocol.common import REFUSED, Refused, TokenId
from trtllm_lite.runtime.server.protocol.strict import Strict
from trtllm_lite.runtime.server.protocol.tools import MAX_TOOLS, ToolDefinition

TOKENIZE_REFUSED: Mapping[str, Refused] = {
    "chat_template": REFUSED["chat_template"],
}


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
    continue_final_message: bool | None = Field(
        None, description="only with messages, and not with add_generation_prompt"
    )
    tools: list[ToolDefinition] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """Token ids, special ones included."""

    model: str | None = None
    tokens: list[TokenId]
