"""Calls as Mistral's models write them, in the older and the newer form."""

from collections.abc import Collection

from trtllm_lite.runtime.server.parsers.call_reader import ArgumentsObject
from trtllm_lite.runtime.server.parsers.json_scanner import WHITESPACE
from trtllm_lite.runtime.server.parsers.tool_parser import ToolCallParser

_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or for each call
    `[TOOL_CALLS]name[ARGS]{...}`, with `[CALL_ID]...` before `[ARGS]` in some versions.

    The markers are special tokens: decode with `skip_special_tokens` off.
    """

    marker = "[TOOL_CALLS]"

    def __init__(self, names: Collection[str], *, eager: bool = False) -> None:
        super().__init__(names, eager=eager)
        self._in_list = False
        self._name, self._tag = "", ""

    def _after_marker(self, char: str) -> bool:
        self._in_list, self._name = False, ""
        if char in WHITESPACE:
            return self._hold(char)
        if char == "[":
            self._in_list, self._state = True, self._read_object
            return self._hold(char)
        self._state = self._read_object if char == "{" else self._read_name
        return False

    def _end_call(self) -> None:
        self._read_gap()
        if self._in_list:
            self._state = self._read_separator

    def _read_separator(self, char: str) -> bool:
        """After a call in a list."""
        if char == "]":
            self._held.clear()
            self._read_gap()
            return True
        if char == ",":
            self._state = self._read_object
        elif char not in WHITESPACE:
            return self._break_off()
        return self._hold(char)

    def _read_name(self, char: str) -> bool:
        if char not in "[{":
            self._name += char
            starts = any(name.startswith(self._name) for name in self.names)
            return self._hold(char) if starts else self._break_off()
        if self._name not in self.names:
            return self._break_off()
        self._tag, self._state = "", self._read_arguments if char == "{" else self._read_tag
        return False

    def _read_tag(self, char: str) -> bool:
        self._tag += char
        if self._tag == _ARGS:
            self._state = self._read_arguments
        elif self._tag == _CALL_ID:
            self._state = self._read_id
        elif not (_ARGS.startswith(self._tag) or _CALL_ID.startswith(self._tag)):
            return self._break_off()
        return self._hold(char)

    def _read_id(self, char: str) -> bool:
        if char.isalnum():
            return self._hold(char)
        self._tag, self._state = "", self._read_tag
        return False

    def _read_arguments(self, char: str) -> bool:
        if char in WHITESPACE:
            return self._hold(char)
        if char == "{":
            return self._begin(ArgumentsObject(self._name), char)
        return self._break_off()
