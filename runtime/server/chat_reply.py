"""Answers of /v1/chat/completions, whole and streamed."""

from collections.abc import Iterable, Sequence
from typing import Any

from trtllm_lite.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_lite.runtime.server.answer_reader import AnswerReader
from trtllm_lite.runtime.server.errors import ApiError, error_object
from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
    new_call_id,
)
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.replies import (
    Head,
    ScoreCursor,
    Tokens,
    UsagePlan,
    scored_tokens,
    usage,
)
from trtllm_lite.runtime.server.service import Served
from trtllm_lite.runtime.server.token_scores import TokenScores
from trtllm_lite.runtime.server.tool_calls import Reading

_CHUNK = "chat.completion.chunk"


class ChatReply:
    """The answer to one conversation. See `Reply`."""

    def __init__(self, body: ChatRequest, served: Served, choices: int, reading: Reading) -> None:
        self._head = Head.new("chatcmpl", served)
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._scores: TokenScores | None = None
        if self._top is not None:
            self._scores = TokenScores(served.llm.tokenizer.token_bytes, self._top)
        self._usage = UsagePlan.of(body)
        self._choices, self._llm = choices, served.llm
        self._readers = [AnswerReader(reading) for _ in range(choices)]
        self._cursor = ScoreCursor()
        self._ended: set[int] = set()
        self._last: RequestOutput | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = [self._whole_choice(output, choice) for choice in output.outputs]
        counts = self._counts(output)
        return {**self._head.of("chat.completion"), "choices": choices, "usage": counts}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        made = [self._chunk(index, delta) for index in range(self._choices)]
        if self._usage.continuous and self._last is not None:
            # There is a first result by now, of which this chunk has no token.
            made = [{**chunk, "usage": usage([self._last], scored_only=True)} for chunk in made]
        return made

    def chunks(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        self._last = output
        return [chunk for choice in output.outputs for chunk in self._new(output, choice)]

    def closing(self) -> list[dict[str, Any]]:
        if not self._usage.at_end or self._last is None:
            return []
        return [{**self._head.of(_CHUNK), "choices": [], "usage": self._counts(self._last)}]

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        return [error_object(error)]

    def _counts(self, output: RequestOutput) -> dict[str, Any]:
        """Usage once everything is read."""
        thought = sum(self._readers[c.index].thought_tokens(self._llm, c) for c in output.outputs)
        return {**usage([output]), "completion_tokens_details": {"reasoning_tokens": thought}}

    def _whole_choice(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": _message(self._readers[choice.index].whole(output, choice)),
            "logprobs": self._logprobs(scored_tokens(choice)),
            "finish_reason": self._reason(choice),
            "stop_reason": choice.stop_reason,
        }

    def _new(self, output: RequestOutput, choice: CompletionOutput) -> list[dict[str, Any]]:
        if choice.index in self._ended:
            return []
        ended = choice.finish_reason is not None
        deltas = [_delta(event) for event in self._readers[choice.index].new(output, choice)]
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

    def _reason(self, choice: CompletionOutput) -> str | None:
        called = self._readers[choice.index].has_calls
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
        if self._scores is None:
            return None
        content = [self._scores.entry(entry) for entry in tokens if entry is not None]
        return {"content": content, "refusal": None}


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
