"""The bodies of POST /v1/messages (https://docs.anthropic.com/en/api/messages) and of POST
/v1/messages/count_tokens."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from trtllm_lite.runtime.server.protocol.common import Count, Refused, SharedFields
from trtllm_lite.runtime.server.protocol.message_blocks import InputMessage, Texts
from trtllm_lite.runtime.server.protocol.strict import Strict
from trtllm_lite.runtime.server.protocol.tools import MAX_TOOLS


class MessageTool(Strict):
    """One of `tools`. `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Strict):
    """`tool_choice`; `name` goes with type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, min_length=1, max_length=64)
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """`thinking`. A budget is a wish: max_tokens is what bounds reasoning, except where the chat
    template itself knows a budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized"] | None = Field(
        None, description="reasoning comes as it is, not as a summary"
    )


class OutputFormat(Strict):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: str | None = Field(
        None, max_length=64, description="where the chat template uses reasoning_effort"
    )


class PromptFields(Strict):
    """What the prompt is made of: all that /v1/messages/count_tokens takes."""

    model: str | None = Field(None, description="one of the served names; null is the first")
    messages: list[InputMessage] = Field(
        min_length=1,
        description="roles user, assistant and system; an assistant's in the last place is gone on "
        "with; blocks of type text, thinking, redacted_thinking, tool_use and tool_result",
    )
    system: Texts | None = Field(None, description="a text, or blocks of type text")
    tools: list[MessageTool] | None = Field(
        None, max_length=MAX_TOOLS, description="of type custom"
    )
    tool_choice: ToolChoice | None = Field(None, description="only with tools")
    thinking: Thinking | None = Field(
        None,
        description="null is disabled where the chat template has a switch; without one, only what "
        "the model does anyway is allowed; a budget is a wish",
    )
    output_config: OutputConfig | None = Field(
        None, description="format of type json_schema, and effort"
    )


class CountTokensRequest(PromptFields):
    """The body of /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, SharedFields):
    """Field by field as Anthropic has them; further sampling fields as in chat completions."""

    max_tokens: Count = Field(description="gives way where the context is too short for it")
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy")
    stop_sequences: list[str] | None = Field(
        None, description="at most 16 strings, none empty; not part of the answer"
    )


_OTHER_API = "not supported here; use /v1/chat/completions"

MESSAGES_REFUSED: Mapping[str, Refused] = {
    "mcp_servers": Refused("not supported: this server calls no other", ([],)),
    "container": Refused("not supported: this server runs no code"),
    "context_management": Refused("not supported; shorten the messages"),
    "output_format": Refused("not supported here; use output_config.format"),
    "response_format": Refused("not supported here; use output_config.format"),
    "reasoning_effort": Refused("not supported here; use output_config.effort"),
    "chat_template_kwargs": Refused(_OTHER_API),
    "max_completion_tokens": Refused("not supported here; use max_tokens"),
    "continue_final_message": Refused(
        "not supported here; the answer goes on with a last message of the assistant", (False,)
    ),
    "speed": Refused("not supported: there is one speed", ("standard",)),
    "stop": Refused("not supported here; use stop_sequences"),
    "logprobs": Refused(_OTHER_API, (False,)),
    "top_logprobs": Refused(_OTHER_API, (0,)),
    "n": Refused("not supported here: a request has one answer", (1,)),
}

MESSAGES_NO_EFFECT = ("metadata", "service_tier", "cache_control", "inference_geo")
