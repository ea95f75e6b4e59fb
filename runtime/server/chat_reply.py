"""Answers of /v1/chat/completions, whole and streamed."""

from collections.abc import Iterable, Sequence
from typing import Any

from trtllm_lite.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    new_call_id,
)
from trtllm_lite.runtime.server.parsers.output_parser import OutputParser
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.replies import (
    Head,
    ScoreCursor,
    Tokens,
    UsagePlan,
    chosen,
    likeliest,
    scored_tokens,
    usage,
)
from trtllm_lite.runtime.server.service import Served
from trtllm_lite.runtime.server.tool_calls import Reading

_CHUNK = "chat.completion.chunk"


class ChatReply:
    """The answer to one conversation. See `Reply`."""

    def __init__(self, body: ChatRequest, served: Served, choices: int, reading: Reading) -> None:
        self._head = Head.new("chatcmpl", served)
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._usage = UsagePlan.of(body)
        self._choices = choices
        self._reading = reading
        self._parsers: dict[int, OutputParser] = {}
        self._cursor = ScoreCursor()
        self._ended: set[int] = set()
        self._last: RequestOutput | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = [self._whole_choice(output, choice) for choice in output.outputs]
        return {**self._head.of("chat.completion"), "choices": choices, "usage": usage(outputs)}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta) for index in range(self._choices)]

    def chunks(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        self._last = output
        return [chunk for choice in output.outputs for chunk in self._new(output, choice)]

    def closing(self) -> list[dict[str, Any]]:
        if not self._usage.at_end or self._last is None:
            return []
        return [{**self._head.of(_CHUNK), "choices": [], "usage": usage([self._last])}]

    def _whole_choice(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": _message(self._events(output, choice, choice.text, ended=True)),
            "logprobs": self._logprobs(scored_tokens(choice)),
            "finish_reason": self._reason(choice),
            "stop_reason": choice.stop_reason,
        }

    def _new(self, output: RequestOutput, choice: CompletionOutput) -> list[dict[str, Any]]:
        if choice.index in self._ended:
            return []
        ended = choice.finish_reason is not None
        events = self._events(output, choice, choice.delta, ended=ended)
        deltas = [_delta(event) for event in events]
        tokens = () if self._top is None else self._cursor.new(0, choice)
        if tokens and not deltas:
            deltas = [{"content": ""}]
        # Scores go with the first part of the text that they came with.
        made = [
            self._chunk(choice.index, delta, () if i else tokens) for i, delta in enumerate(deltas)
        ]
        if ended:
            self._ended.add(choice.index)
            last = self._chunk(choice.index, {})
            last["choices"][0]["finish_reason"] = self._reason(choice)
            last["choices"][0]["stop_reason"] = choice.stop_reason
            made.append(last)
        return made

    def _events(
        self, output: RequestOutput, choice: CompletionOutput, text: str, *, ended: bool
    ) -> list[Event]:
        """What more of a choice's text means."""
        if self._reading.is_plain:
            return [ContentDelta(text)] if text else []
        parser = self._parsers.get(choice.index)
        if parser is None:
            parser = self._parsers[choice.index] = self._reading.parser(output.prompt)
        events = parser.feed(text)
        if ended:
            events = [*events, *parser.finish()]
        return [event for event in events if self._is_wanted(event)]

    def _is_wanted(self, event: Event) -> bool:
        """Without parallel calls the first one counts."""
        tools = self._reading.tools
        if tools is None or not isinstance(event, ToolCallStart | ToolCallArguments):
            return True
        return tools.parallel or event.index == 0

    def _reason(self, choice: CompletionOutput) -> str | None:
        parser = self._parsers.get(choice.index)
        called = parser is not None and parser.num_calls > 0
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def _chunk(self, index: int, delta: dict[str, Any], tokens: Tokens = ()) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        choice["logprobs"] = self._logprobs(tokens) if tokens else None
        chunk = {**self._head.of(_CHUNK), "choices": [choice]}
        if self._usage.continuous:
            chunk["usage"] = usage([] if self._last is None else [self._last])
        elif self._usage.at_end:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Tokens) -> dict[str, Any] | None:
        if self._top is None:
            return None
        content = []
        for entry in tokens:
            if entry is not None:
                top = [_token(x.decoded_token, x.logprob) for x in likeliest(entry, self._top)]
                taken = chosen(entry)
                token = _token(taken.decoded_token, taken.logprob)
                content.append({**token, "top_logprobs": top})
        return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    """`bytes` is null for a token that is part of a character only: its bytes are not known."""
    data = None if "\ufffd" in text else list(text.encode("utf-8"))
    return {"token": text, "logprob": logprob, "bytes": data}


def _delta(event: Event) -> dict[str, Any]:
    """An event as a part of a streamed message."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": new_call_id(), "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.delta}}]}


def _message(events: Iterable[Event]) -> dict[str, Any]:
    """All events of a choice as one message."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": new_call_id(), "type": "function", "function": function})
        else:
            calls[event.index]["function"]["arguments"] += event.delta
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return message
