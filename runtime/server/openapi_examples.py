"""Bodies to begin with, shown with each route. Without `model` the first one that is served
answers."""

from collections.abc import Mapping
from typing import Any

Example = dict[str, Any]

_HELLO = [{"role": "user", "content": "What is the capital of France?"}]
_CITY: Example = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
_WEATHER: Example = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": _CITY,
    },
}

CHAT: Mapping[str, Example] = {
    "question": {"messages": _HELLO, "max_tokens": 32},
    "streamed": {
        "messages": _HELLO,
        "max_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "json_schema": {
        "messages": _HELLO,
        "max_tokens": 32,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": _CITY},
        },
    },
    "tools": {"messages": _HELLO, "max_tokens": 32, "tools": [_WEATHER]},
}
RESPONSES: Mapping[str, Example] = {
    "question": {"input": "What is the capital of France?", "max_output_tokens": 32},
    "json_schema": {
        "input": "What is the capital of France?",
        "max_output_tokens": 32,
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": _CITY}},
    },
}
MESSAGES: Mapping[str, Example] = {
    "question": {"messages": _HELLO, "max_tokens": 32},
    "streamed": {"messages": _HELLO, "max_tokens": 32, "stream": True},
}
COUNT_TOKENS: Mapping[str, Example] = {"question": {"messages": _HELLO}}
COMPLETION: Mapping[str, Example] = {
    "continue": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    "score": {
        "prompt": "The capital of France is Paris",
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
    },
}
TOKENIZE: Mapping[str, Example] = {
    "text": {"prompt": "The capital of France"},
    "conversation": {"messages": _HELLO},
}
DETOKENIZE: Mapping[str, Example] = {"ids": {"tokens": [1, 2, 3]}}
