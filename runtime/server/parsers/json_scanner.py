"""One JSON object read a character at a time, as RFC 8259 has it and not an inch wider."""

import enum
import string
from collections.abc import Mapping
from types import MappingProxyType

WHITESPACE = " \t\n\r"
MAX_DEPTH = 64


class At(enum.Enum):
    """What the next character belongs to."""

    START = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    FIRST_VALUE = enum.auto()
    VALUE = enum.auto()
    AFTER_VALUE = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    WORD = enum.auto()
    END = enum.auto()


def _number_rows() -> Mapping[str, Mapping[str, str]]:
    digits = string.digits
    exponent = {"e": "exponent", "E": "exponent"}
    rows = {
        "start": {"-": "minus", "0": "zero", **dict.fromkeys("123456789", "whole")},
        "minus": {"0": "zero", **dict.fromkeys("123456789", "whole")},
        "zero": {".": "point", **exponent},
        "whole": {**dict.fromkeys(digits, "whole"), ".": "point", **exponent},
        "point": dict.fromkeys(digits, "fraction"),
        "fraction": {**dict.fromkeys(digits, "fraction"), **exponent},
        "exponent": {**dict.fromkeys(digits, "power"), "+": "sign", "-": "sign"},
        "sign": dict.fromkeys(digits, "power"),
        "power": dict.fromkeys(digits, "power"),
    }
    return MappingProxyType({name: MappingProxyType(row) for name, row in rows.items()})


_NUMBER = _number_rows()
_WHOLE_NUMBER = frozenset(("zero", "whole", "fraction", "power"))
_WORDS = MappingProxyType({"t": "true", "f": "false", "n": "null"})


class JsonScanner:
    """Tells of each character whether a JSON object can go on with it. Time per character and
    memory are constant: brackets nest to 64 levels."""

    def __init__(self) -> None:
        self.at = At.START
        self._closers: list[str] = []
        self._in_key = False
        self._hex_left = 0
        self._number = ""
        self._word_left = ""
        self._steps = {
            At.START: self._start,
            At.FIRST_KEY: self._first_key,
            At.KEY: self._key,
            At.COLON: self._colon,
            At.FIRST_VALUE: self._first_value,
            At.VALUE: self._value,
            At.AFTER_VALUE: self._after_value,
            At.STRING: self._string,
            At.ESCAPE: self._escape,
            At.HEX: self._hex,
            At.NUMBER: self._in_number,
            At.WORD: self._word,
            At.END: self._end,
        }

    @property
    def depth(self) -> int:
        """How many brackets are open."""
        return len(self._closers)

    def step(self, char: str) -> bool:
        """Read one character. False: no JSON object begins with the text so far; the scanner is
        then of no further use. The text is a whole object as soon as `at` is At.END."""
        return self._steps[self.at](char)

    def _start(self, char: str) -> bool:
        return char == "{" and self._open(char)

    def _first_key(self, char: str) -> bool:
        return self._close() if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        if char == '"':
            self._in_key, self.at = True, At.STRING
            return True
        return self._blank(char)

    def _colon(self, char: str) -> bool:
        if char == ":":
            self.at = At.VALUE
            return True
        return self._blank(char)

    def _first_value(self, char: str) -> bool:
        return self._close() if char == "]" else self._value(char)

    def _value(self, char: str) -> bool:
        if char in WHITESPACE:
            return True
        if char in "{[":
            return self._open(char)
        if char == '"':
            self.at = At.STRING
        elif char in _WORDS:
            self._word_left, self.at = _WORDS[char][1:], At.WORD
        else:
            self._number, self.at = _NUMBER["start"].get(char, ""), At.NUMBER
            return self._number != ""
        return True

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self.at = At.KEY if self._closers[-1] == "}" else At.VALUE
            return True
        return self._close() if char == self._closers[-1] else self._blank(char)

    def _string(self, char: str) -> bool:
        if char == "\\":
            self.at = At.ESCAPE
        elif char == '"' and self._in_key:
            self._in_key, self.at = False, At.COLON
        elif char == '"':
            self.at = At.AFTER_VALUE
        return char >= " "

    def _escape(self, char: str) -> bool:
        self._hex_left = 4
        self.at = At.HEX if char == "u" else At.STRING
        return char in '"\\/bfnrtu'

    def _hex(self, char: str) -> bool:
        self._hex_left -= 1
        if not self._hex_left:
            self.at = At.STRING
        return char in string.hexdigits

    def _in_number(self, char: str) -> bool:
        following = _NUMBER[self._number].get(char)
        if following is not None:
            self._number = following
            return True
        if self._number not in _WHOLE_NUMBER:
            return False
        self.at = At.AFTER_VALUE
        return self._after_value(char)

    def _word(self, char: str) -> bool:
        if char != self._word_left[0]:
            return False
        self._word_left = self._word_left[1:]
        if not self._word_left:
            self.at = At.AFTER_VALUE
        return True

    def _end(self, char: str) -> bool:
        return False

    def _blank(self, char: str) -> bool:
        return char in WHITESPACE

    def _open(self, char: str) -> bool:
        if self.depth == MAX_DEPTH:
            return False
        self._closers.append("}" if char == "{" else "]")
        self.at = At.FIRST_KEY if char == "{" else At.FIRST_VALUE
        return True

    def _close(self) -> bool:
        self._closers.pop()
        self.at = At.AFTER_VALUE if self._closers else At.END
        return True
