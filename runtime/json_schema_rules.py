"""What is done to a JSON schema before a grammar is made of it, so that no text of the grammar is
invalid: looser readings of the library are made stricter, and what it would pass over is refused.

Held against the JSON-Schema-Test-Suite by `tools/conformance/json_schema_suite.py`.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

ALLOWED_ESCAPES = 'nrbtf\\"'
"""Of characters in the text. Without `u` each has one spelling: no property can be written in
disguise, past the schema of its name."""

_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""What only an escape with `u` can write."""
_REFUSED = ("contentEncoding", "contentMediaType", "contentSchema")
_DATA = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
# Days that there are (RFC 3339): the library has 29 of them in every February.
_YEAR = r"[0-9]{4}"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
# Without leap seconds, which are in few minutes only.
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_CLOCK})"
_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": f"^{_DATE}$",
        "time": f"^{_TIME}$",
        "date-time": f"^{_DATE}[Tt]{_TIME}$",
    }
)
# White space of ECMA 262, which is not quite Unicode's.
_SPACES = r"\t\n\x0b\x0c\r\x{feff}\x{2028}\x{2029}\p{Zs}"
_CLASSES: Mapping[str, str] = MappingProxyType({"s": f"[{_SPACES}]", "S": f"[^{_SPACES}]"})
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def tightened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose grammar holds valid texts only. Raises ValueError that names the keyword, or the
    character, that nothing can be made of."""
    for text in _texts(schema):
        found = _CONTROL.search(text)
        if found is not None:
            raise ValueError(f"it holds the control character U+{ord(found[0]):04X}; leave it out")
    return _schema(schema)


def _texts(value: Any) -> Iterator[str]:
    """All strings in JSON data, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    for name in _REFUSED:
        if name in schema:
            raise ValueError(f"the keyword {name} is not supported; remove it")
    _check_count(schema)
    made = {name: _keyword(name, value) for name, value in schema.items()}
    form, others = schema.get("format"), made.get("allOf", [])
    if isinstance(form, str) and form in _FORMATS and isinstance(others, list):
        made["allOf"] = [*others, {"pattern": _FORMATS[form]}]
    return made


def _check_count(schema: Mapping[str, Any]) -> None:
    """Free names may be written twice, and then count once: no grammar knows them all."""
    least, required = schema.get("minProperties"), schema.get("required")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > known + 1:
        allowed = f"at most {known + 1}, which is one more than are required"
        raise ValueError(f"the keyword minProperties is {least:g}; allowed: {allowed}")


def _keyword(name: str, value: Any) -> Any:
    if name in _DATA:
        return value
    if name == "pattern" and isinstance(value, str):
        return _pattern(value)
    if name in _BY_NAME and isinstance(value, Mapping):
        key = _pattern if name == "patternProperties" else str
        return {key(each): _value(inner) for each, inner in value.items()}
    return _value(value)


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "$ref" in value and "$id" in value:
            # Up to draft 7 the $id counts for nothing, later the $ref is relative to it.
            raise ValueError("the keyword $id beside $ref, inside the schema, is not supported")
        return _schema(value)
    return [_value(each) for each in value] if isinstance(value, list) else value


def _pattern(pattern: str) -> str:
    return _ESCAPE.sub(lambda found: _CLASSES.get(found[1], found[0]), pattern)
