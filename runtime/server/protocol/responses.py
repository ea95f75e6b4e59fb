"""The body of POST /v1/responses (https://platform.openai.com/docs/api-reference/responses)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from trtllm_lite.runtime.server.protocol.common import (
    Count,
    Refused,
    SharedFields,
    TopLogprobs,
)
from trtllm_lite.runtime.server.protocol.forms import Texts, one_of, text_or_object
from trtllm_lite.runtime.server.protocol.response_items import Input
from trtllm_lite.runtime.server.protocol.strict import Strict
from trtllm_lite.runtime.server.protocol.tools import MAX_TOOLS

Included = Literal["message.output_text.logprobs"]
LOGPROBS: Included = "message.output_text.logprobs"
"""The one value of `include`."""


class TextFormat(Strict):
    """`text.format`: the shape of `response_format` with the schema's fields beside the type. The
    schema is always kept to, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="has no effect")


class ResponseTool(Strict):
    """A function of `tools`."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    """A `tool_choice` that names one."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[FunctionChoice, Tag("object")],
    one_of(text_or_object, "'none', 'auto', 'required', or an object that names a function"),
]


class ReasoningOptions(Strict):
    """`reasoning`."""

    effort: str | None = Field(
        None, max_length=64, description="where the chat template uses reasoning_effort"
    )
    summary: Literal["auto"] | None = Field(
        None, description="none is made: reasoning comes as it is"
    )


class ResponseStreamOptions(Strict):
    """`stream_options`."""

    include_obfuscation: Literal[False] | None = None


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


class ResponsesRequest(SharedFields):
    """Field by field as OpenAI has them; further sampling fields as in chat completions. Nothing
    is stored, so a conversation comes whole with every request."""

    input: Input = Field(
        description="a text, or items of type message, function_call, function_call_output and "
        "reasoning; text only"
    )
    instructions: str | None = Field(None, description="a system message in front")
    max_output_tokens: Count | None = Field(None, description="null is what the context has left")
    stop: Texts | None = Field(
        None, description="at most 16 strings, none empty; not part of the answer"
    )
    text: TextOptions | None = Field(
        None, description="format of type text, json_object, or json_schema with a schema"
    )
    tools: list[ResponseTool] | None = Field(
        None, max_length=MAX_TOOLS, description="of type function"
    )
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Included] | None = Field(
        None, description="not together with tools, nor where the answer may hold reasoning"
    )
    top_logprobs: TopLogprobs | None = Field(
        None, description=f"above 0 only with {LOGPROBS} in include"
    )
    metadata: Metadata | None = Field(None, description="comes back with the response")
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables that the chat template uses"
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="only with stream")


_NOT_STORED = "not supported: this server stores nothing; send the whole conversation as input"

RESPONSES_REFUSED: Mapping[str, Refused] = {
    "store": Refused("not supported: this server stores nothing; leave it out or false", (False,)),
    "previous_response_id": Refused(_NOT_STORED),
    "conversation": Refused(_NOT_STORED),
    "background": Refused("not supported: this server stores nothing; use stream", (False,)),
    "prompt": Refused("not supported: this server stores no prompts; use instructions and input"),
    "truncation": Refused("not supported; shorten the input", ("disabled",)),
    "context_management": Refused("not supported; shorten the input", ([],)),
    "moderation": Refused("not supported: this server moderates nothing"),
    "max_tool_calls": Refused("not supported: it is for tools that a server runs itself"),
    "messages": Refused("not supported here; use input"),
    "max_tokens": Refused("not supported here; use max_output_tokens"),
    "max_completion_tokens": Refused("not supported here; use max_output_tokens"),
    "response_format": Refused("not supported here; use text.format"),
    "reasoning_effort": Refused("not supported here; use reasoning.effort"),
    "logprobs": Refused(f"not supported here; use include with {LOGPROBS}", (False,)),
    "n": Refused("not supported here: a request has one response", (1,)),
    "continue_final_message": Refused("not supported here; use /v1/chat/completions", (False,)),
}

RESPONSES_NO_EFFECT = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
)
