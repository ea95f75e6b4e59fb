"""What becomes of the old settings: one row each, and the commands that they add up to."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["mapped", "automatic", "no equivalent"]


@dataclass(frozen=True)
class Row:
    """One old setting. `new` is the option that stands for it, empty without one; `note` says what
    is different, or why there is none. `names`: the settings that it is about, where they are
    several; `old` is then what they have in common."""

    old: str
    value: str
    kind: Kind
    new: str
    note: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """The commands, in order, as argument lists, and a row for every old setting that is set.
    `unset`: the others, which are off or what they are by default."""

    version: str
    architecture: str
    export: tuple[str, ...]
    build: tuple[str, ...]
    serve: tuple[str, ...]
    rows: tuple[Row, ...]
    unset: tuple[str, ...]
