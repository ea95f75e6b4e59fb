"""Calls as Llama 3.1, 3.2 and 3.3 write them."""

from trtllm_lite.runtime.server.parsers.tool_parser import ToolCallParser


class Llama3JsonParser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}` in place of an answer, several separated by `;`.

    An object is a call where nothing but calls stands before it, or directly after
    `<|python_tag|>`. An answer that is some other object comes out as content as soon as its first
    strange key is read.
    """

    marker = "<|python_tag|>"
    gaps = frozenset(("", ";"))

    def _begins_call(self, char: str) -> bool:
        return char == "{"
