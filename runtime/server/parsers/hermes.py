"""Calls as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write them."""

from trtllm_lite.runtime.server.parsers.tool_parser import ToolCallParser


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.

    A closing tag may be missing: the object itself tells where it ends.
    """

    marker = "<tool_call>"
    closing = "</tool_call>"
