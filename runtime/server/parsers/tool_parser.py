"""What all parsers of tool calls share: text before, between and after calls, and giving back."""

from collections.abc import Callable, Collection
from typing import ClassVar

from trtllm_lite.runtime.server.parsers.call_reader import CallObject, CallReader
from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallStart,
    merged,
)
from trtllm_lite.runtime.server.parsers.json_scanner import WHITESPACE
from trtllm_lite.runtime.stop_strings import StopMatcher

MAX_HELD = 2**18
"""Characters of an unfinished call that are held back before they are given up as content."""
_MAX_GAP = 64


class ToolCallParser:
    """Splits the text of one answer into content and tool calls, as it grows.

    It reads one character at a time and never goes back, so the events do not depend on how the
    text is cut, except for how they are cut themselves (`merged` joins them). A call is reported
    once it is whole, with its arguments as the model wrote them. What begins like a call and turns
    out to be none comes out as content, every character of it; so an answer without a call is
    content from end to end. White space before a call and between calls belongs to the calls.

    `eager` reports arguments while they are written. What breaks off later is then a call with
    unfinished arguments, and the text after it is content: for answers that a grammar keeps to the
    form, where only the length limit can cut a call.
    """

    marker: ClassVar[str]
    """What a call begins with."""
    closing: ClassVar[str | None] = None
    """What may stand after a call."""
    gaps: ClassVar[frozenset[str]] = frozenset(("",))
    """What may stand between two calls, white space aside."""

    def __init__(self, names: Collection[str], *, eager: bool = False) -> None:
        """`names`: the tools that may be called; a call of any other is content."""
        self.names = frozenset(names)
        self._eager = eager
        markers = (self.marker,) if self.closing is None else (self.marker, self.closing)
        self._matcher = StopMatcher(markers)
        self._firsts = frozenset(marker[0] for marker in markers)
        self._state: Callable[[str], bool] = self._read_text
        self._held: list[str] = []
        self._events: list[Event] = []
        self._gap, self._may_close = True, False
        self._reader: CallReader = CallObject(self.names)
        self._num_calls, self._started = 0, False

    @property
    def num_calls(self) -> int:
        """Calls reported so far."""
        return self._num_calls

    def feed(self, delta: str) -> list[Event]:
        """Read on; what is certain now. Linear in the text."""
        if self._is_plain(delta):
            return [ContentDelta(delta)]
        for char in delta:
            # A state that does not take the character has changed to one that does.
            while not self._state(char):
                pass
            if len(self._held) > MAX_HELD:
                self._break_off()
        return self._taken()

    def finish(self) -> list[Event]:
        """The rest, when the answer has ended. An unfinished call comes out as content."""
        if self._gap and self._ends_call("".join(self._held)):
            self._held.clear()
        self._break_off()
        return self._taken()

    def _after_marker(self, char: str) -> bool:
        """The state after `marker`, up to the call."""
        return self._read_object(char)

    def _begins_call(self, char: str) -> bool:
        """Whether a call begins with this character, first of all or first after a call."""
        return False

    def _end_call(self) -> None:
        """Choose the state after a call."""
        self._read_gap()

    def _read_gap(self) -> None:
        self._gap, self._may_close = True, True
        self._state = self._read_text

    def _read_text(self, char: str) -> bool:
        if self._gap and not self._matcher.hold and self._begins_call(char):
            return self._begin(CallObject(self.names), char)
        self._held.append(char)
        found = self._matcher.feed(char)
        if found is None:
            self._release(self._matcher.hold)
        elif found[1] == self.marker:
            self._release(len(self.marker))
            self._state = self._after_marker
        else:
            self._close()
        return True

    def _close(self) -> None:
        """The closing marker: part of the call that it follows, or else content."""
        self._release(len(self.closing or ""))
        if self._gap and self._may_close:
            self._held.clear()
        else:
            self._gap = False
            self._release(0)
        self._may_close = False

    def _read_object(self, char: str) -> bool:
        """The state before a call's object."""
        if char in WHITESPACE:
            return self._hold(char)
        if char == "{":
            return self._begin(CallObject(self.names), char)
        return self._break_off()

    def _begin(self, reader: CallReader, char: str) -> bool:
        self._reader, self._started = reader, False
        self._state = self._read_call
        return self._read_call(char)

    def _read_call(self, char: str) -> bool:
        if not self._reader.step(char):
            return self._break_off()
        if not self._started:
            self._held.append(char)
        if self._eager or self._reader.done:
            self._report()
        if self._reader.done:
            self._started = False
            self._end_call()
        return True

    def _report(self) -> None:
        name = self._reader.name
        delta = "" if name is None else self._reader.take()
        if name is None or not delta:
            return
        if not self._started:
            self._started = True
            self._held.clear()
            self._events.append(ToolCallStart(self._num_calls, name))
            self._num_calls += 1
        self._events.append(ToolCallArguments(self._num_calls - 1, delta))

    def _hold(self, char: str) -> bool:
        self._held.append(char)
        return True

    def _break_off(self) -> bool:
        """Give back what is held, and read text. The current character is not taken."""
        self._gap = False
        self._release(0)
        self._state = self._read_text
        return False

    def _release(self, keep: int) -> None:
        """Turn all that is held but the last `keep` characters into content."""
        free = len(self._held) - keep
        if free <= 0:
            return
        if self._gap and free <= _MAX_GAP and self._fits_gap("".join(self._held[:free])):
            return
        self._gap = False
        self._events.append(ContentDelta("".join(self._held[:free])))
        del self._held[:free]

    def _fits_gap(self, text: str) -> bool:
        stripped = text.strip(WHITESPACE)
        return not stripped or (self._num_calls > 0 and stripped in self.gaps)

    def _ends_call(self, text: str) -> bool:
        """Whether the text after a call is only what goes with it, perhaps cut short."""
        closing = self.closing if self._may_close and self.closing else ""
        return self._num_calls > 0 and (
            self._fits_gap(text) or closing.startswith(text.strip(WHITESPACE))
        )

    def _is_plain(self, delta: str) -> bool:
        """Whether the text is content whatever follows, without a look at each character."""
        idle = self._state == self._read_text and not self._held and not self._gap
        return idle and delta != "" and self._firsts.isdisjoint(delta)

    def _taken(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events
