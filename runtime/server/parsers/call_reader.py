"""The JSON object of one tool call, read a character at a time."""

import json
from collections.abc import Collection
from typing import Protocol

from trtllm_lite.runtime.server.parsers.json_scanner import At, JsonScanner

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset(("name", "id", "type", *_ARGUMENTS))


class CallReader(Protocol):
    """Reads the object of one call, its first brace included."""

    @property
    def name(self) -> str | None:
        """The tool's name, once it is read."""

    @property
    def done(self) -> bool:
        """The object is whole and is a call."""

    def step(self, char: str) -> bool:
        """Read one character. False: the text is not, and will not become, a call."""

    def take(self) -> str:
        """The text of the arguments that has come since the last `take`."""


class CallObject:
    """`{"name": "...", "arguments": {...}}` of a known tool, keys in any order.

    The arguments may be called "parameters". "id" and "type", which some models write, are read
    and passed over; other keys, a key that comes twice, arguments that are no object, and names
    that are not in `names` make it something else than a call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._scanner = JsonScanner()
        self._seen: set[str] = set()
        self._key = ""
        self._string: list[str] | None = None
        self._arguments: list[str] = []
        self._in_arguments = False
        self._name: str | None = None

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def done(self) -> bool:
        return self._scanner.at is At.END

    def take(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def step(self, char: str) -> bool:
        before, depth = self._scanner.at, self._scanner.depth
        if not self._scanner.step(char):
            return False
        if self._in_arguments:
            self._arguments.append(char)
            self._in_arguments = self._scanner.depth > 1
            return True
        if self._scanner.depth == 0:
            return self._is_call()
        return depth != 1 or self._member(before, char)

    def _member(self, before: At, char: str) -> bool:
        """A character outside of nested values: part of a key or of a plain value."""
        after = self._scanner.at
        if self._string is not None:
            self._string.append(char)
        if before in (At.FIRST_KEY, At.KEY) and after is At.STRING:
            self._string = [char]
        elif before is At.VALUE and after is not At.VALUE:
            return self._begin_value(char)
        elif before is At.STRING and after is At.COLON:
            return self._end_key()
        elif before is At.STRING and after is At.AFTER_VALUE:
            return self._end_string()
        return True

    def _end_key(self) -> bool:
        self._key = self._read_string()
        kind = "arguments" if self._key in _ARGUMENTS else self._key
        known = self._key in _KEYS and kind not in self._seen
        self._seen.add(kind)
        return known

    def _begin_value(self, char: str) -> bool:
        if self._key in _ARGUMENTS:
            self._in_arguments = True
            self._arguments.append(char)
            return char == "{"
        if self._key == "name":
            self._string = [char]
            return char == '"'
        return True

    def _end_string(self) -> bool:
        if self._key != "name":
            return True
        self._name = self._read_string()
        return self._name in self._names

    def _read_string(self) -> str:
        text = "".join(self._string or ())
        self._string = None
        return str(json.loads(text))

    def _is_call(self) -> bool:
        return {"name", "arguments"} <= self._seen


class ArgumentsObject:
    """The arguments of a tool whose name stood before them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scanner = JsonScanner()
        self._text: list[str] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def done(self) -> bool:
        return self._scanner.at is At.END

    def take(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text

    def step(self, char: str) -> bool:
        if not self._scanner.step(char):
            return False
        self._text.append(char)
        return True
