"""What a parser of generated text reports."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call of the tool `name` begins. `index` counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments: JSON text, as the model wrote it."""

    index: int
    delta: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind (and one call) joined."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [_joined(run) for run in runs]


def new_call_id() -> str:
    """An id for one tool call, as OpenAI's clients know them: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def _continues(before: Event, event: Event) -> bool:
    if isinstance(event, ToolCallStart) or type(before) is not type(event):
        return False
    if isinstance(event, ToolCallArguments) and isinstance(before, ToolCallArguments):
        return before.index == event.index
    return True


def _joined(run: list[Event]) -> Event:
    first = run[0]
    if len(run) == 1 or isinstance(first, ToolCallStart):
        return first
    text = "".join(_text(event) for event in run)
    if isinstance(first, ToolCallArguments):
        return ToolCallArguments(first.index, text)
    return type(first)(text)


def _text(event: Event) -> str:
    if isinstance(event, ToolCallStart):
        return ""
    return event.delta if isinstance(event, ToolCallArguments) else event.text
