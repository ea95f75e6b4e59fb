"""How each family writes tool calls, for grammars that keep a model to it."""

import enum
from dataclasses import dataclass


class Slot(enum.Enum):
    """What a form leaves open."""

    NAME = enum.auto()
    ARGUMENTS = enum.auto()
    SPACE = enum.auto()
    """A space, or none: tokenizers differ."""


@dataclass(frozen=True)
class CallForm:
    """The whole of an answer is `begin`, calls with `between` between them, and `end`."""

    call: tuple[str | Slot, ...]
    begin: tuple[str | Slot, ...] = ()
    between: tuple[str | Slot, ...] = ()
    end: tuple[str | Slot, ...] = ()


_OBJECT = ('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}")

HERMES = CallForm(
    call=("<tool_call>", "\n", *_OBJECT, "\n", "</tool_call>"),
    between=("\n",),
)
LLAMA3_JSON = CallForm(
    call=('{"name": "', Slot.NAME, '", "parameters": ', Slot.ARGUMENTS, "}"),
    between=("; ",),
)
MISTRAL = CallForm(
    begin=("[TOOL_CALLS]", Slot.SPACE, "["),
    call=_OBJECT,
    between=(", ",),
    end=("]",),
)
MISTRAL_ARGS = CallForm(call=("[TOOL_CALLS]", Slot.NAME, "[ARGS]", Slot.ARGUMENTS))
