"""The items of a response's output, which grow, and the events that tell of it."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallStart,
    new_call_id,
)

Json = dict[str, Any]
Scores = Sequence[Json]
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItems:
    """The output of one response. An item is open until text of another kind begins, or the answer
    ends: so only the last can be incomplete. Events come without their sequence number."""

    def __init__(self) -> None:
        self.done: list[Json] = []
        self._open: _Item | None = None

    def take(self, event: Event, scores: Scores = ()) -> list[Json]:
        """What an event adds. `scores`: logprobs of the tokens that its text came with."""
        if isinstance(event, ToolCallStart):
            return self._begin(_Call(len(self.done) + self._is_open, event.name))
        if isinstance(event, ToolCallArguments):
            return self._more(event.delta)
        kind = _Message if isinstance(event, ContentDelta) else _Reasoning
        made: list[Json] = []
        if not isinstance(self._open, kind):
            made = self._begin(kind(len(self.done) + self._is_open))
        return made + self._more(event.text, scores)

    def end(self, status: Status) -> list[Json]:
        """The answer has ended. One without anything in it is an empty message."""
        made: list[Json] = []
        if self._open is None:
            made = self._begin(_Message(0))
        return made + self._close(status)

    @property
    def _is_open(self) -> bool:
        return self._open is not None

    def _begin(self, item: "_Item") -> list[Json]:
        made = [] if self._open is None else self._close("completed")
        self._open = item
        return [*made, *item.opening()]

    def _more(self, text: str, scores: Scores = ()) -> list[Json]:
        # Parsers tell of a call before its arguments: there always is an item.
        return [] if self._open is None else [self._open.more(text, scores)]

    def _close(self, status: Status) -> list[Json]:
        item, self._open = self._open, None
        if item is None:
            return []
        self.done.append(item.json(status))
        return item.closing(status)


class _Item(ABC):
    """One item. `events`: what the names of events about its text begin with."""

    prefix: ClassVar[str]
    events: ClassVar[str]

    def __init__(self, index: int) -> None:
        self._index = index
        self._id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._pieces: list[str] = []

    @abstractmethod
    def json(self, status: Status) -> Json:
        """The item as it is now."""

    @abstractmethod
    def closing(self, status: Status) -> list[Json]:
        """That it is whole."""

    def opening(self) -> list[Json]:
        """That there is a new item."""
        return [self._told("response.output_item.added", "in_progress")]

    def more(self, text: str, scores: Scores) -> Json:
        """That it has more text."""
        self._pieces.append(text)
        return self._event(f"{self.events}.delta", delta=text)

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self._id, "output_index": self._index, **fields}

    def _told(self, kind: str, status: Status) -> Json:
        return {"type": kind, "output_index": self._index, "item": self.json(status)}


class _TextItem(_Item):
    """An item with one part of text."""

    @abstractmethod
    def part(self) -> Json:
        """The part as it is now."""

    def opening(self) -> list[Json]:
        added = self._told("response.output_item.added", "in_progress")
        # An item begins without parts: the part is told of by itself.
        added["item"]["content"] = []
        return [added, self._part_event("response.content_part.added", part=self.part())]

    def closing(self, status: Status) -> list[Json]:
        return [
            self._text_done(),
            self._part_event("response.content_part.done", part=self.part()),
            self._told("response.output_item.done", status),
        ]

    def more(self, text: str, scores: Scores) -> Json:
        return {**super().more(text, scores), "content_index": 0}

    def _text_done(self) -> Json:
        return self._part_event(f"{self.events}.done", text=self._text)

    def _part_event(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, content_index=0, **fields)


class _Message(_TextItem):
    prefix = "msg"
    events = "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._scores: list[Json] = []

    def more(self, text: str, scores: Scores) -> Json:
        self._scores += scores
        return {**super().more(text, scores), "logprobs": list(scores)}

    def part(self) -> Json:
        scores = list(self._scores)
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": scores}

    def json(self, status: Status) -> Json:
        made = {"id": self._id, "type": "message", "status": status, "role": "assistant"}
        return {**made, "content": [self.part()]}

    def _text_done(self) -> Json:
        return {**super()._text_done(), "logprobs": list(self._scores)}


class _Reasoning(_TextItem):
    prefix = "rs"
    events = "response.reasoning_text"

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self._text}

    def json(self, status: Status) -> Json:
        made = {"id": self._id, "type": "reasoning", "status": status, "summary": []}
        return {**made, "content": [self.part()]}


class _Call(_Item):
    prefix = "fc"
    events = "response.function_call_arguments"

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index)
        self._name = name
        self._call_id = new_call_id()

    def json(self, status: Status) -> Json:
        made = {"id": self._id, "type": "function_call", "status": status}
        call = {"call_id": self._call_id, "name": self._name, "arguments": self._text}
        return {**made, **call}

    def closing(self, status: Status) -> list[Json]:
        done = self._event(f"{self.events}.done", name=self._name, arguments=self._text)
        return [done, self._told("response.output_item.done", status)]
