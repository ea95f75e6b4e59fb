"""Which parser reads a model's tool calls and reasoning: told by name, or by its chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.server.parsers import call_form
from trtllm_lite.runtime.server.parsers.call_form import CallForm
from trtllm_lite.runtime.server.parsers.hermes import HermesParser
from trtllm_lite.runtime.server.parsers.llama3_json import Llama3JsonParser
from trtllm_lite.runtime.server.parsers.mistral import MistralParser
from trtllm_lite.runtime.server.parsers.reasoning import CLOSING
from trtllm_lite.runtime.server.parsers.tool_parser import ToolCallParser


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing tool calls."""

    name: str
    parser: type[ToolCallParser]
    form: CallForm
    needs_special_tokens: bool
    """The markers are special tokens: text for the parser is decoded with them left in."""


_HERMES = ToolFormat("hermes", HermesParser, call_form.HERMES, needs_special_tokens=False)
_LLAMA3 = ToolFormat(
    "llama3_json", Llama3JsonParser, call_form.LLAMA3_JSON, needs_special_tokens=False
)
_MISTRAL = ToolFormat("mistral", MistralParser, call_form.MISTRAL, needs_special_tokens=True)
_MISTRAL_ARGS = ToolFormat(
    "mistral_args", MistralParser, call_form.MISTRAL_ARGS, needs_special_tokens=True
)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {form.name: form for form in (_HERMES, _LLAMA3, _MISTRAL, _MISTRAL_ARGS)}
)

_OTHERS = ("<function=", "<arg_key>", "<tool_sep>", "<parameter=")
"""Signs of formats that share a marker with Hermes and put no JSON behind it."""


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises UsageError."""
    if name not in TOOL_FORMATS:
        allowed = ", ".join(sorted(TOOL_FORMATS))
        raise UsageError(f"tool parser: got {name!r}; allowed: {allowed}")
    return TOOL_FORMATS[name]


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template (Jinja source) writes calls in; None when it shows no sign
    of one that is known here."""
    if "<tool_call>" in template:
        return None if any(sign in template for sign in _OTHERS) else _HERMES
    if "[TOOL_CALLS]" in template:
        return _MISTRAL_ARGS if "[ARGS]" in template else _MISTRAL
    # Inside of a Jinja string the quotes may be escaped.
    asks_for_json = '"parameters": ' in template.replace("\\", "")
    return _LLAMA3 if "<|start_header_id|>" in template and asks_for_json else None


def detect_reasoning(template: str) -> bool:
    """Whether a chat template (Jinja source) knows of `<think>...</think>`."""
    return CLOSING in template
