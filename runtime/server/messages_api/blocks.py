"""The content blocks of an answer, which grow, and the events that tell of it."""

import secrets
from abc import ABC, abstractmethod
from typing import Any

import orjson

from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallStart,
)

Json = dict[str, Any]


class ContentBlocks:
    """The content of one message. A block is open until text of another kind begins, or the answer
    ends."""

    def __init__(self) -> None:
        self.done: list[Json] = []
        self._open: _Block | None = None

    def take(self, event: Event) -> list[Json]:
        """What an event adds."""
        if isinstance(event, ToolCallStart):
            return self._begin(_ToolUse(event.name))
        if isinstance(event, ToolCallArguments):
            return self._more(event.delta)
        kind = _Text if isinstance(event, ContentDelta) else _Thinking
        made = [] if isinstance(self._open, kind) else self._begin(kind())
        return made + self._more(event.text)

    def end(self) -> list[Json]:
        """The answer has ended."""
        block, self._open = self._open, None
        if block is None:
            return []
        stop = {"type": "content_block_stop", "index": len(self.done)}
        self.done.append(block.json())
        return [stop]

    def _begin(self, block: "_Block") -> list[Json]:
        made = self.end()
        self._open = block
        index = len(self.done)
        begun = {"type": "content_block_start", "index": index, "content_block": block.json()}
        return [*made, begun]

    def _more(self, text: str) -> list[Json]:
        # Parsers tell of a call before its arguments: there always is a block.
        if self._open is None:
            return []
        delta, index = self._open.more(text), len(self.done)
        return [{"type": "content_block_delta", "index": index, "delta": delta}]


class _Block(ABC):
    """One block."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def more(self, text: str) -> Json:
        """That it has more text, which is kept."""
        self._pieces.append(text)
        return self._delta(text)

    @abstractmethod
    def json(self) -> Json:
        """The block as it is now."""

    @abstractmethod
    def _delta(self, text: str) -> Json: ...


class _Text(_Block):
    def json(self) -> Json:
        return {"type": "text", "text": self._text, "citations": None}

    def _delta(self, text: str) -> Json:
        return {"type": "text_delta", "text": text}


class _Thinking(_Block):
    """The signature is empty: what comes back is believed."""

    def json(self) -> Json:
        return {"type": "thinking", "thinking": self._text, "signature": ""}

    def _delta(self, text: str) -> Json:
        return {"type": "thinking_delta", "thinking": text}


class _ToolUse(_Block):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._id = f"toolu_{secrets.token_hex(12)}"

    def json(self) -> Json:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": self._input()}

    def _input(self) -> Any:
        """The arguments as an object: empty while there are none, and where the end of the answer
        cuts them."""
        try:
            return orjson.loads(self._text)
        except orjson.JSONDecodeError:
            return {}

    def _delta(self, text: str) -> Json:
        return {"type": "input_json_delta", "partial_json": text}
