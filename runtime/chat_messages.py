"""Chat messages from outside, checked and rebuilt as plain data for a chat template."""

import json
from collections.abc import Mapping
from typing import Any

from trtllm_lite.runtime.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MAX_DEPTH = 64

Message = dict[str, Any]


def check_messages(messages: object) -> list[Message]:
    """Copies of the messages that hold only plain JSON values. Raises RequestError("messages").

    Content is a string, or a list of text parts, which are joined with newlines (as vLLM does), or
    None where an assistant only calls tools, which becomes "", as most templates want. Other keys
    that are None are left out, since many templates would print them. Tool call arguments given as
    JSON text become the object they stand for, and reasoning is passed on under each name that
    templates know it by.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError("messages", f"got {type(messages).__name__}; allowed: a list")
    if not messages:
        raise RequestError("messages", "got an empty list; at least one message is needed")
    return [_message(f"messages[{i}]", item) for i, item in enumerate(messages)]


def plain(param: str, where: str, value: object, depth: int = 0) -> Any:
    """A copy of JSON-like data made of exact built-in types, so that nothing a template can call
    hides in it. Raises RequestError naming `param` for anything else."""
    if depth > _MAX_DEPTH:
        raise RequestError(param, f"{where} is nested deeper than {_MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _unicode(param, where, str.__str__(value))
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list | tuple):
        return [plain(param, where, item, depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            _unicode(param, where, str.__str__(key)): plain(param, where, item, depth + 1)
            for key, item in value.items()
        }
    raise RequestError(param, f"{where} holds a {type(value).__name__}; allowed: JSON values")


def _message(where: str, item: object) -> Message:
    if not isinstance(item, Mapping):
        raise RequestError("messages", f"{where} is a {type(item).__name__}; allowed: an object")
    role = item.get("role")
    if role not in ROLES:
        raise RequestError("messages", f"{where}.role is {role!r}; allowed: {', '.join(ROLES)}")
    rest = {key: value for key, value in item.items() if key != "content" and value is not None}
    message: Message = plain("messages", where, rest)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    content = item.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise RequestError("messages", f"{where}.content is missing; allowed: text")
    message["content"] = _content(f"{where}.content", content)
    return _with_reasoning(message)


def _content(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode("messages", where, str.__str__(content))
    if not isinstance(content, list | tuple):
        allowed = "allowed: a string or a list of text parts"
        raise RequestError("messages", f"{where} is a {type(content).__name__}; {allowed}")
    return "\n".join(_text_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _text_part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        allowed = 'allowed: {"type": "text", "text": ...}'
        raise RequestError("messages", f"{where} is a {type(part).__name__}; {allowed}")
    if part.get("type") != "text":
        kind = f"{where} is a part of type {part.get('type')!r}"
        raise RequestError("messages", f"{kind}; this model takes text only")
    if not isinstance(part.get("text"), str):
        raise RequestError("messages", f"{where}.text is not a string")
    return _unicode("messages", where, str.__str__(part["text"]))


def _tool_calls(where: str, calls: object) -> list[Message]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError("messages", f"{where} is not a list of objects")
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"])
    return calls


def _arguments(text: str) -> object:
    """The object that JSON text stands for; the text itself when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _with_reasoning(message: Message) -> Message:
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {**dict.fromkeys(_REASONING, found), **message}


def _unicode(param: str, where: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{where} holds a lone surrogate at character {error.start}; allowed: Unicode"
        raise RequestError(param, message) from error
    return text
