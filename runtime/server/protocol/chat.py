"""The body of POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trtllm_lite.runtime.server.protocol.common import Count, Refused, Sampling, TopLogprobs
from trtllm_lite.runtime.server.protocol.tools import MAX_TOOLS, ToolChoice, ToolDefinition


class ChatRequest(Sampling):
    """Field by field as OpenAI and vLLM have them. Messages are checked where they become a
    prompt."""

    messages: list[dict[str, Any]] = Field(
        min_length=1, description="roles system, developer, user, assistant, tool; text only"
    )
    max_tokens: Count | None = Field(None, description="null is what the context has left")
    max_completion_tokens: Count | None = Field(None, description="wins over max_tokens")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = Field(None, description="only with logprobs true")
    tools: list[ToolDefinition] | None = Field(None, min_length=1, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = Field(None, description="only with tools")
    parallel_tool_calls: bool | None = Field(None, description="only with tools")
    reasoning_effort: str | None = Field(
        None, max_length=64, description="where the chat template uses it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables that the chat template uses"
    )
    add_generation_prompt: bool | None = Field(
        None, description="null is true without continue_final_message"
    )
    continue_final_message: bool | None = Field(
        None,
        description="the answer goes on with the last message, the assistant's; not with "
        "add_generation_prompt",
    )


CHAT_REFUSED: Mapping[str, Refused] = {
    "echo": Refused("not supported; use /v1/completions", (False,)),
    "audio": Refused("not supported: this server answers with text"),
    "modalities": Refused("not supported beyond text", (["text"],)),
    "prediction": Refused("not supported; speculation is the server's option"),
    "web_search_options": Refused("not supported"),
    "functions": Refused("not supported; use tools"),
    "function_call": Refused("not supported; use tools", ("none",)),
    "documents": Refused("not supported"),
    "mm_processor_kwargs": Refused("not supported: this server takes text only"),
}
