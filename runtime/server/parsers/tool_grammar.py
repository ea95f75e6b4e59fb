"""`tool_choice` required or named: the grammar of answers that call tools and do nothing else.

The grammar is in llguidance's dialect of Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.json_schema_rules import ALLOWED_ESCAPES, tightened
from trtllm_lite.runtime.server.parsers.call_form import CallForm, Slot
from trtllm_lite.runtime.server.parsers.reasoning import CLOSING, OPENING

MAX_CALLS = 32
"""Calls in one constrained answer."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType(
    {"type": "object", "properties": {}, "additionalProperties": False}
)
# At most one space after each separator, as templates write JSON: with white space free, a model
# may write it without end.
_LAYOUT = MappingProxyType(
    {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
        "json_allowed_escapes": ALLOWED_ESCAPES,
    }
)


@dataclass(frozen=True)
class FunctionTool:
    """A tool of a request. `parameters` is the JSON schema of its arguments, an object; None where
    it takes none. Raises RequestError("tools") for a name that is not 1 to 64 letters, digits,
    `_`, `-` and `.`, and for a schema that is not one of an object."""

    name: str
    parameters: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            allowed = "allowed: 1 to 64 letters, digits, '_', '-', '.'"
            raise RequestError("tools", f"got a function named {self.name[:70]!r}; {allowed}")
        if self.parameters is None:
            return
        GrammarSpec.json_schema(self.parameters, param="tools")
        kind = self.parameters.get("type", "object")
        if kind != "object":
            got = f"the parameters of {self.name} are of type {str(kind)[:70]!r}"
            raise RequestError("tools", f"{got}; allowed: 'object'")


class Thought(enum.Enum):
    """Whether `<think>` reasoning may come before the calls."""

    NONE = enum.auto()
    POSSIBLE = enum.auto()
    """The model may open it."""
    OPENED = enum.auto()
    """The prompt has opened it: it comes first."""


def tool_grammar(
    form: CallForm,
    tools: Sequence[FunctionTool],
    *,
    name: str | None = None,
    parallel: bool = True,
    special_tokens: Mapping[str, int],
    thought: Thought = Thought.NONE,
) -> GrammarSpec:
    """The grammar of answers of one call or, with `parallel`, up to 32.

    `name` is the tool that must be called, once; None: any of them. `special_tokens` maps the text
    of the tokenizer's special tokens to their ids: a marker among them is that token, any other is
    ordinary text. Arguments follow their schema with at most one space after `,` and `:`.

    Raises RequestError for no tools, two of one name, too much of them ("tools"), and an unknown
    `name` ("tool_choice").
    """
    chosen = _chosen(tools, name)
    writer = _Writer(special_tokens)
    one_of = " | ".join(f"call_{i}" for i in range(len(chosen)))
    start = [writer.thought(thought), writer.pieces(form.begin), "call"]
    if parallel and name is None:
        start.append(f"({writer.pieces(form.between)} call){{0,{MAX_CALLS - 1}}}")
    start.append(writer.pieces(form.end))
    rules = ["%llguidance {}", f"start: {' '.join(filter(None, start))}", f"call: {one_of}"]
    for i, tool in enumerate(chosen):
        rules.append(f"call_{i}: {writer.pieces(form.call, tool.name, f'arguments_{i}')}")
        rules.append(f"arguments_{i}: %json {_schema(tool)}")
    rules += writer.thought_rules(thought)
    return GrammarSpec.lark("\n".join(rules) + "\n", param="tools")


class _Writer:
    """Writes pieces of a form as Lark expressions."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens

    def pieces(self, pieces: Iterable[str | Slot], name: str = "", arguments: str = "") -> str:
        return " ".join(self._piece(piece, name, arguments) for piece in pieces)

    def thought(self, thought: Thought) -> str:
        if thought is Thought.NONE:
            return ""
        return "thought" if thought is Thought.OPENED else f"({self._literal(OPENING)} thought)?"

    def thought_rules(self, thought: Thought) -> list[str]:
        if thought is Thought.NONE:
            return []
        # A token ends the text by itself; a string has to be found as soon as it is written.
        lazy = "" if CLOSING in self._special_tokens else "[lazy]"
        return [
            r"thought: thinking /\n{0,2}/",
            f"thinking{lazy}: TEXT {self._literal(CLOSING)}",
            r"TEXT: /(.|\n)*/",
        ]

    def _piece(self, piece: str | Slot, name: str, arguments: str) -> str:
        if piece is Slot.SPACE:
            return '" "?'
        if piece is Slot.ARGUMENTS:
            return arguments
        return self._literal(name if isinstance(piece, Slot) else piece)

    def _literal(self, text: str) -> str:
        token_id = self._special_tokens.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _chosen(tools: Sequence[FunctionTool], name: str | None) -> list[FunctionTool]:
    if not tools:
        raise RequestError("tools", "got an empty list; at least one tool is needed")
    names = [tool.name for tool in tools]
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise RequestError("tools", f"got two functions named {twice}; rename one")
    if name is None:
        return list(tools)
    if name not in names:
        allowed = ", ".join(names)[:500]
        raise RequestError("tool_choice", f"got the function {name[:70]!r}; allowed: {allowed}")
    return [tools[names.index(name)]]


def _schema(tool: FunctionTool) -> str:
    try:
        parameters = tightened(_NO_ARGUMENTS if tool.parameters is None else tool.parameters)
    except ValueError as error:
        raise RequestError("tools", f"the parameters of {tool.name}: {error}") from None
    return json.dumps({"type": "object", **parameters, "x-guidance": dict(_LAYOUT)})
