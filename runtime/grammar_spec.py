"""What a caller asks of the text of an answer: a JSON schema, a regular expression, a choice."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from trtllm_lite.runtime.errors import RequestError

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_BYTES = 256 * 1024
"""Of a description, as UTF-8."""
MAX_DEPTH = 100
"""Arrays and objects inside each other in a schema: JSON parsers stop at 128."""


@dataclass(frozen=True)
class GrammarSpec:
    """A description of the allowed texts. Make one with the class methods.

    `text` is the schema or the list of choices as JSON, the regular expression, or the grammar;
    empty for json_object. `param` is the field that errors name, and no part of what is described.
    Raises RequestError for an unknown kind, or a text that is empty, no text, or over MAX_BYTES.
    """

    kind: GrammarKind
    text: str = ""
    param: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            allowed = ", ".join(get_args(GrammarKind))
            raise RequestError(self.param, f"got kind {self.kind!r}; allowed: {allowed}")
        if not isinstance(self.text, str) or (self.kind == "json_object") != (not self.text):
            got = f"got {type(self.text).__name__} {self.text!r:.40}"
            allowed = "none" if self.kind == "json_object" else "a non-empty string"
            raise RequestError(self.param, f"{got} for a {self.kind}; allowed: {allowed}")
        if self.num_bytes > MAX_BYTES:
            got = f"the {self.kind} has {self.num_bytes} bytes"
            raise RequestError(self.param, f"{got}; at most {MAX_BYTES}: make it shorter")

    @property
    def num_bytes(self) -> int:
        """Of the text, as UTF-8."""
        return len(self.text.encode("utf-8", "replace"))

    @classmethod
    def json_object(cls, *, param: str = "grammar") -> "GrammarSpec":
        """Any JSON object."""
        return cls("json_object", "", param)

    @classmethod
    def json_schema(cls, schema: Mapping[str, object], *, param: str = "grammar") -> "GrammarSpec":
        """JSON that fits a schema (draft 2020-12), with properties in the schema's order. Raises
        RequestError for what is no JSON object, or has more than MAX_DEPTH levels."""
        if not isinstance(schema, Mapping):
            got = type(schema).__name__
            raise RequestError(param, f"got a schema of type {got}; allowed: an object")
        if not _is_shallow(schema):
            raise RequestError(param, f"the schema is nested over {MAX_DEPTH} levels; flatten it")
        if "x-guidance" in schema:
            raise RequestError(param, "the schema keyword x-guidance is not supported; remove it")
        try:
            text = json.dumps(dict(schema), allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise RequestError(param, f"the schema is no JSON: {error}") from None
        return cls("json_schema", text, param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "grammar") -> "GrammarSpec":
        """Texts that a regular expression matches as a whole (the syntax of Rust's regex crate:
        no look-around, no back references)."""
        return cls("regex", pattern, param)

    @classmethod
    def choice(cls, options: Sequence[str], *, param: str = "grammar") -> "GrammarSpec":
        """One of several texts. Raises RequestError unless they are non-empty strings."""
        texts = list(options) if isinstance(options, list | tuple) else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            got = f"got {type(options).__name__} {options!r:.40}"
            raise RequestError(param, f"{got}; allowed: a non-empty list of non-empty strings")
        return cls("choice", json.dumps(texts), param)

    @classmethod
    def lark(cls, grammar: str, *, param: str = "grammar") -> "GrammarSpec":
        """A grammar in llguidance's variant of Lark's syntax, with rule `start`. For forms that the
        program itself writes: options of rules such as max_tokens and temperature do nothing."""
        return cls("lark", grammar, param)


def _is_shallow(schema: Mapping[str, object]) -> bool:
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _nested(parent)]
        if not level:
            return True
    return False


def _nested(value: object) -> list[object]:
    """The arrays and objects directly inside one."""
    inside: Iterable[object] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    return [v for v in inside if isinstance(v, Mapping | list | tuple)]
