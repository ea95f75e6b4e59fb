"""Tools that vendors' own servers run, which are known by their type and not served here."""

from collections.abc import Mapping
from typing import Any

from trtllm_lite.runtime.server.errors import invalid


def check_tool_types(raw: Mapping[str, Any], allowed: str) -> None:
    """Raises ApiError for the first of `tools` in an unchecked body with another type."""
    tools = raw.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != allowed:
            got = f"tools.{index}: got type {kind[:60]!r}, which this server does not run"
            raise invalid(f"{got}; allowed: {allowed}", "tools", "unsupported_parameter")
