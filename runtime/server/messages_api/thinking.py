"""`thinking`: whether the model is to reason, told to its chat template."""

from collections.abc import Set
from typing import Any

from trtllm_lite.runtime.server.protocol.common import unsupported
from trtllm_lite.runtime.server.protocol.messages import Thinking

SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates know the switch: Qwen's and GLM's, DeepSeek's and Granite's."""
BUDGET = "thinking_budget"


def thinking_variables(
    thinking: Thinking | None, known: Set[str], *, reasons: bool
) -> dict[str, Any]:
    """Variables for the template. `known`: those that it uses; `reasons`: whether the model's
    reasoning is told apart. Left out, thinking is off, as in Anthropic's API. Raises ApiError for
    what the model cannot do."""
    switch = next((name for name in SWITCHES if name in known), None)
    kind = "disabled" if thinking is None else thinking.type
    if kind == "adaptive":
        return {}
    if kind == "enabled":
        if not reasons:
            raise unsupported("thinking", "the model does not reason; allowed: type disabled")
        made = {} if switch is None else {switch: True}
        return {**made, **_budget(thinking, known)}
    if switch is not None:
        return {switch: False}
    if reasons and thinking is not None:
        why = "the model always reasons: its chat template has no switch"
        raise unsupported("thinking", f"{why}; allowed: type enabled")
    return {}


def _budget(thinking: Thinking | None, known: Set[str]) -> dict[str, Any]:
    budget = None if thinking is None else thinking.budget_tokens
    return {BUDGET: budget} if budget is not None and BUDGET in known else {}
