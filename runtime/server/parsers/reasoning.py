"""The `<think>...</think>` before an answer, told apart from the answer."""

from collections.abc import Callable

from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    merged,
)
from trtllm_lite.runtime.server.parsers.json_scanner import WHITESPACE
from trtllm_lite.runtime.stop_strings import StopMatcher

OPENING, CLOSING = "<think>", "</think>"
_MAX_GAP = 64


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside of an opened `<think>`, as some templates have it."""
    return prompt.rstrip(WHITESPACE).endswith(OPENING)


def leaves_reasoning_open(content: str) -> bool:
    """Whether an answer that is to be gone on with ends inside of its `<think>`."""
    return content.lstrip(WHITESPACE).startswith(OPENING) and CLOSING not in content


class ReasoningSplitter:
    """Splits the text of one answer into reasoning and content, as it grows.

    Reasoning is what stands between `<think>`, first of all in the text or last of all in the
    prompt, and `</think>`, or the end where that is missing. The tags and the white space around
    them belong to neither. Tags further on are content. Linear in the text; what is held back is
    bounded.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt has opened the reasoning (see `opens_reasoning`)."""
        self._opened = opened
        self._state: Callable[[str], bool] = self._read_start
        self._closing = StopMatcher((CLOSING,))
        self._held = ""
        self._events: list[Event] = []

    @property
    def inside(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._opened and self._state not in (self._read_gap, self._read_content)

    def feed(self, delta: str) -> list[Event]:
        """Read on; what is certain now."""
        if self._state == self._read_content:
            return [ContentDelta(delta)] if delta else []
        for char in delta:
            # A state that does not take the character has changed to one that does.
            while not self._state(char):
                pass
        return self._taken()

    def finish(self) -> list[Event]:
        """The rest, when the answer has ended."""
        if self._opened and self._state == self._read_start:
            held, self._held = self._held, ""
            self._replay_as_reasoning(held)
        if self._opened:
            self._reason(self._held.rstrip(WHITESPACE))
        elif self._held:
            self._events.append(ContentDelta(self._held))
        self._held = ""
        return self._taken()

    def _read_start(self, char: str) -> bool:
        """The first characters: perhaps the opening tag, which a model may also repeat."""
        text = self._held + char
        tag = text.lstrip(WHITESPACE)
        if tag == OPENING:
            self._held, self._opened, self._state = "", True, self._read_lead
            return True
        if OPENING.startswith(tag) and len(text) <= _MAX_GAP:
            self._held = text
            return True
        held, self._held = self._held, ""
        if self._opened:
            self._replay_as_reasoning(held)
        else:
            self._state = self._read_content
            if held:
                self._events.append(ContentDelta(held))
        return False

    def _replay_as_reasoning(self, held: str) -> None:
        """What is held is no tag. At most a tag and a gap long, it is read once more."""
        self._state = self._read_lead
        for char in held:
            while not self._state(char):
                pass

    def _read_lead(self, char: str) -> bool:
        """White space before the reasoning."""
        if char not in WHITESPACE:
            self._state = self._read_reasoning
        return char in WHITESPACE

    def _read_reasoning(self, char: str) -> bool:
        self._held += char
        if self._closing.feed(char) is not None:
            self._reason(self._held[: -len(CLOSING)].rstrip(WHITESPACE))
            self._held, self._state = "", self._read_gap
            return True
        free = len(self._held) - self._closing.hold
        shown = len(self._held[:free].rstrip(WHITESPACE))
        shown = max(shown, free - _MAX_GAP)
        self._reason(self._held[:shown])
        self._held = self._held[shown:]
        return True

    def _read_gap(self, char: str) -> bool:
        """White space after the reasoning."""
        if char not in WHITESPACE:
            self._state = self._read_content
        return char in WHITESPACE

    def _read_content(self, char: str) -> bool:
        self._events.append(ContentDelta(char))
        return True

    def _reason(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def _taken(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events
