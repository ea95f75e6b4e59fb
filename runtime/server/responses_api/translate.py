"""A checked body of /v1/responses in the form of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any

from trtllm_lite.runtime.server.conversation import shared_fields
from trtllm_lite.runtime.server.errors import invalid
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.protocol.response_items import (
    Content,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    RefusalPart,
    TextPart,
)
from trtllm_lite.runtime.server.protocol.responses import (
    LOGPROBS,
    FunctionChoice,
    ResponsesRequest,
    ResponseTool,
)

Message = dict[str, Any]


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The conversation that a body asks to continue. Raises ApiError."""
    raw = {
        **shared_fields(body),
        **_tools(body),
        "messages": chat_messages(body),
        "n": 1,
        "max_tokens": body.max_output_tokens,
        "stop": body.stop,
        "stream_options": None if body.stream_options is None else {},
        "response_format": _response_format(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "logprobs": True if wants_scores(body) else None,
        "top_logprobs": body.top_logprobs if wants_scores(body) else None,
    }
    return ChatRequest.parse(raw)


def wants_scores(body: ResponsesRequest) -> bool:
    """Whether the text comes with logprobs. Raises ApiError for alternatives without them."""
    asked = LOGPROBS in (body.include or ())
    if body.top_logprobs and not asked:
        message = f"top_logprobs: allowed only with {LOGPROBS!r} in include"
        raise invalid(message, "top_logprobs")
    return asked


def chat_messages(body: ResponsesRequest) -> list[Message]:
    """Messages as chat templates know them. Raises ApiError for an output without its call."""
    front = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*front, {"role": "user", "content": body.input}]
    turns = _Turns()
    for index, item in enumerate(body.input):
        turns.add(index, item)
    if not front and not turns.messages:
        raise invalid("input: got reasoning alone; allowed: items with a message", "input")
    return [*front, *turns.messages]


class _Turns:
    """Puts items together: what the model thought, said and called in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._calls: dict[str, str] = {}
        self._assistant: Message | None = None
        self._thought = ""

    def add(self, index: int, item: Item) -> None:
        if isinstance(item, ReasoningItem):
            self._assistant, self._thought = None, _joined(self._thought, item)
        elif isinstance(item, FunctionCallItem):
            self._call(item)
        elif isinstance(item, FunctionOutputItem):
            self._output(index, item)
        elif item.role == "assistant":
            self._say(item)
        else:
            self._close()
            self.messages.append({"role": item.role, "content": _content(item.content)})

    def _say(self, item: MessageItem) -> None:
        message = self._open()
        if message["content"] is not None:
            self._close()
            message = self._open()
        message["content"] = _content(item.content)

    def _call(self, item: FunctionCallItem) -> None:
        self._calls[item.call_id] = item.name
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._open().setdefault("tool_calls", []).append(call)

    def _output(self, index: int, item: FunctionOutputItem) -> None:
        name = self._calls.get(item.call_id)
        if name is None:
            got = f"input.{index}.call_id: got {item.call_id[:60]!r}"
            raise invalid(f"{got}; allowed: the call_id of a function_call before it", "input")
        self._close()
        made = {"role": "tool", "tool_call_id": item.call_id, "name": name}
        self.messages.append({**made, "content": _content(item.output)})

    def _open(self) -> Message:
        if self._assistant is None:
            self._assistant = {"role": "assistant", "content": None}
            if self._thought:
                self._assistant["reasoning_content"] = self._thought
            self._thought = ""
            self.messages.append(self._assistant)
        return self._assistant

    def _close(self) -> None:
        """Reasoning that nothing follows is left out: no template has a place for it."""
        self._assistant, self._thought = None, ""


def _content(content: Content) -> str | list[Message]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _text(part)} for part in content]


def _text(part: TextPart | RefusalPart) -> str:
    return part.refusal if isinstance(part, RefusalPart) else part.text


def _joined(before: str, item: ReasoningItem) -> str:
    pieces = [piece.text for piece in item.content or item.summary or ()]
    return "\n".join([before, *pieces] if before else pieces)


def _response_format(body: ResponsesRequest) -> Mapping[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    if form.schema_ is None:
        raise invalid("text.format.schema: missing; type 'json_schema' needs it", "text")
    return {"type": form.type, "json_schema": {"schema": form.schema_}}


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    """Nothing where there are none: without tools, a choice that forces none asks for nothing."""
    if body.tools:
        choice: Any = body.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "tools": [_tool(tool) for tool in body.tools],
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls,
        }
    if body.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice: allowed only with tools", "tool_choice")
    return {}


def _tool(tool: ResponseTool) -> dict[str, Any]:
    given = {"description": tool.description, "parameters": tool.parameters}
    function = {"name": tool.name, **{k: v for k, v in given.items() if v is not None}}
    return {"type": "function", "function": function}
