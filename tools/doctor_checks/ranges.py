"""The versions of other packages that this one asks for, as its own metadata has them, and which of
those that are installed are others."""

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*])?\s*([^;\s]*)")
_BOUND = re.compile(r"(>=|<)([0-9.]+)")
OWN = "trtllm-lite"


@dataclass(frozen=True)
class Range:
    """From `least` on, up to but without `below`; None where there is no bound."""

    words: str
    least: tuple[int, ...] | None
    below: tuple[int, ...] | None

    def holds(self, version: str) -> bool:
        """Whether a version is inside. What follows its numbers, as "+cpu", does not count."""
        found = _numbers(version.partition("+")[0])
        return (self.least is None or found >= self.least) and (
            self.below is None or found < self.below
        )


def wanted_ranges(
    requires: Callable[[str], Iterable[str] | None] = importlib.metadata.requires,
) -> Mapping[str, Range]:
    """By the package's name, of all extras. Empty where this package has no metadata."""
    try:
        lines = requires(OWN) or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {name: made for name, made in map(_parsed, lines) if made.words}


def _parsed(line: str) -> tuple[str, Range]:
    match = _REQUIREMENT.match(line)
    name, words = (match[1].lower(), match[2]) if match else ("", "")
    bounds = {sign: _numbers(value) for sign, value in _BOUND.findall(words)}
    return name, Range(words, bounds.get(">="), bounds.get("<"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version))
