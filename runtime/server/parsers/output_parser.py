"""The parsers of one answer, one behind the other: reasoning first, then tool calls."""

from collections.abc import Iterable

from trtllm_lite.runtime.server.parsers.events import ContentDelta, Event, merged
from trtllm_lite.runtime.server.parsers.reasoning import ReasoningSplitter
from trtllm_lite.runtime.server.parsers.tool_parser import ToolCallParser


class OutputParser:
    """Reads the text of one choice of an answer as it grows. Either parser may be missing; what
    it would have found is content then."""

    def __init__(
        self, reasoning: ReasoningSplitter | None = None, tools: ToolCallParser | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_calls(self) -> int:
        """Tool calls reported so far: above 0, an answer that ends by itself finishes with
        "tool_calls"."""
        return 0 if self._tools is None else self._tools.num_calls

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def feed(self, delta: str) -> list[Event]:
        """Read on; what is certain now. Never raises, whatever the text."""
        if self._reasoning is None:
            return self._content([ContentDelta(delta)] if delta else [])
        return self._content(self._reasoning.feed(delta))

    def finish(self) -> list[Event]:
        """The rest, when the answer has ended."""
        events = [] if self._reasoning is None else self._content(self._reasoning.finish())
        if self._tools is not None:
            events += self._tools.finish()
        return merged(events)

    def _content(self, events: Iterable[Event]) -> list[Event]:
        if self._tools is None:
            return list(events)
        found: list[Event] = []
        for event in events:
            found += self._tools.feed(event.text) if isinstance(event, ContentDelta) else [event]
        return found
