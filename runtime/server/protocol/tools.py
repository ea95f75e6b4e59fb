"""`tools`, `tool_choice`, `response_format` and the guided fields of a request body."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from trtllm_lite.runtime.server.protocol.forms import SchemaOrText, one_of, text_or_object
from trtllm_lite.runtime.server.protocol.strict import Strict

MAX_TOOLS = 128


class FunctionDefinition(Strict):
    """A tool's function. `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """The function that must be called."""

    name: str = Field(min_length=1, max_length=64)


class NamedChoice(Strict):
    """A `tool_choice` that names one."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[NamedChoice, Tag("object")],
    one_of(text_or_object, "'none', 'auto', 'required', or an object that names a function"),
]


class JsonSchema(Strict):
    """`response_format.json_schema`. The schema is always kept to, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`response_format`. A `schema` beside json_object is llama.cpp's way to give one."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of four. Its two other forms of text are refused."""

    json_: SchemaOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    grammar: None = Field(None, description="not supported")
    structural_tag: None = Field(None, description="not supported")
