"""What is true of fields beyond their types: checked behind the request models, where a field
becomes a prompt, a parameter or a grammar. Rules that need the model (its vocabulary, context
length and chat template) or several fields are told in words, as descriptions."""

from collections.abc import Mapping
from typing import Any

from trtllm_lite.runtime.chat_messages import ROLES
from trtllm_lite.runtime.sampling_params import INT64, MAX_STOPS
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.protocol.common import SharedFields
from trtllm_lite.runtime.server.protocol.completion import CompletionRequest
from trtllm_lite.runtime.server.protocol.messages import MessagesRequest, MessageTool
from trtllm_lite.runtime.server.protocol.responses import (
    ResponsesRequest,
    ResponseTool,
    TextFormat,
)
from trtllm_lite.runtime.server.protocol.strict import Strict
from trtllm_lite.runtime.server.protocol.tokens import TokenizeRequest
from trtllm_lite.runtime.server.protocol.tools import (
    FunctionDefinition,
    ResponseFormat,
    StructuredOutputs,
)
from trtllm_lite.runtime.server.settings import Limits

Schema = dict[str, Any]

PREFIX = "#/components/schemas/"
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": INT64 - 1}
_TOKENS: Schema = {"type": "array", "items": _TOKEN, "minItems": 1}
_CHOICE: Schema = {"anyOf": [{"type": "array", "items": _TEXT, "minItems": 1}, _NULL]}
_REGEX: Schema = {"anyOf": [_TEXT, _NULL]}
_MESSAGES: Schema = {
    "type": "array",
    "items": {"$ref": f"{PREFIX}ChatMessage"},
    "minItems": 1,
}
_SAMPLING: Mapping[str, Schema] = {
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}, _NULL]},
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,12}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            },
            _NULL,
        ]
    },
    "stop_sequences": {"anyOf": [{"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}, _NULL]},
    "guided_regex": _REGEX,
    "guided_choice": _CHOICE,
}

COMPONENTS: Mapping[str, Schema] = {
    "TextPart": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
    "ChatMessage": {
        "description": "A message of a conversation. Only one of an assistant that calls tools may "
        "be without content. What else it holds is for the chat template.",
        "anyOf": [
            {"$ref": f"{PREFIX}TextMessage"},
            {"$ref": f"{PREFIX}CallMessage"},
        ],
    },
    "TextMessage": {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"$ref": f"{PREFIX}TextPart"}},
                ]
            },
            "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, _NULL]},
        },
        "required": ["role", "content"],
    },
    "CallMessage": {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": _NULL,
            "tool_calls": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        },
        "required": ["role", "tool_calls"],
    },
}
"""Schemas of what no model describes."""


_NEEDS_NO_SCHEMA: Schema = {"properties": {"type": {"enum": ["text", "json_object"]}}}


def model_rules() -> dict[type[Strict], Schema]:
    """By model: what its fields have to be together."""
    return {
        ResponseFormat: {"anyOf": [_NEEDS_NO_SCHEMA, _having("json_schema")]},
        TextFormat: {"anyOf": [_NEEDS_NO_SCHEMA, _having("schema")]},
    }


def _having(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"type": "object"}}}


def field_rules(limits: Limits) -> dict[type[Strict], dict[str, Schema]]:
    """By model and field: the schema in place of the one that its type has."""
    made: dict[type[Strict], dict[str, Schema]] = {
        ChatRequest: {"messages": _MESSAGES},
        CompletionRequest: {"prompt": _prompt(limits.prompts)},
        TokenizeRequest: {"messages": {"anyOf": [_MESSAGES, _NULL]}},
        StructuredOutputs: {"regex": _REGEX, "choice": _CHOICE},
        FunctionDefinition: {"name": _NAME, "parameters": {"anyOf": [_ARGUMENTS, _NULL]}},
        ResponseTool: {"name": _NAME, "parameters": {"anyOf": [_ARGUMENTS, _NULL]}},
        MessageTool: {"name": _NAME, "input_schema": _ARGUMENTS},
        ResponsesRequest: {},
        MessagesRequest: {},
    }
    for model, rules in made.items():
        if issubclass(model, SharedFields):
            names = model.model_fields.keys() & _SAMPLING.keys()
            rules.update({name: _SAMPLING[name] for name in sorted(names)})
    return made


_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_ARGUMENTS: Schema = {
    "description": "a JSON schema of an object",
    "type": "object",
    "properties": {"type": {"const": "object"}},
}


def _prompt(most: int) -> Schema:
    many: Schema = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [_TEXT, {**many, "items": _TEXT}, _TOKENS, {**many, "items": _TOKENS}]}
