"""JSON values to frozen dataclasses, every value checked against the type of its field.

Knows the types that `manifest.py` uses: int, str, Literal, optional values, unions of int and str,
tuples of one type, dict[str, str] and dataclasses of these.
"""

import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.strict_json import shown

MAX_INT = 2**53
MAX_STRING_CHARS = 4096
MAX_ITEMS = 100_000
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,59}")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

T = TypeVar("T")


def decode(kind: type[T], document: Mapping[str, object], *, strict: bool) -> T:
    """A `kind` from a JSON object. Raises BundleError naming the first field that is missing, of
    the wrong type or out of bounds, and, when `strict`, the first that is unknown."""
    made: T = _object(kind, document, "", strict=strict)
    return made


def _object(kind: Any, value: object, at: str, *, strict: bool) -> Any:
    if not isinstance(value, dict):
        raise BundleError(at, f"must be an object, not {_kind(value)}")
    known = {f.name: f for f in fields(kind)}
    if strict and (unknown := [key for key in value if key not in known]):
        raise BundleError(_join(at, unknown[0]), f"unknown field; known: {', '.join(known)}")
    hints = _hints(kind)
    made = {
        name: _value(hints[name], value[name], _join(at, name), strict=strict)
        for name, field in known.items()
        if _present(field, value, at)
    }
    return kind(**made)


def _present(field: "Field[Any]", value: Mapping[str, object], at: str) -> bool:
    if field.name in value:
        return True
    if field.default is MISSING and field.default_factory is MISSING:
        raise BundleError(_join(at, field.name), "is missing")
    return False


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: object, at: str, *, strict: bool) -> Any:
    origin = get_origin(hint)
    if is_dataclass(hint):
        return _object(hint, value, at, strict=strict)
    if origin is Literal:
        return _choice(get_args(hint), value, at)
    if origin in (Union, types.UnionType):
        return _union(get_args(hint), value, at, strict=strict)
    if origin is tuple:
        return _tuple(get_args(hint)[0], value, at, strict=strict)
    if origin is dict:
        return _texts(value, at)
    return _int(value, at) if hint is int else _text(value, at)


def _choice(allowed: tuple[object, ...], value: object, at: str) -> object:
    if not isinstance(value, str) or value not in allowed:
        raise BundleError(at, f"{shown(value)} is not one of {', '.join(map(str, allowed))}")
    return value


def _union(members: tuple[Any, ...], value: object, at: str, *, strict: bool) -> Any:
    for member in members:
        if type(value) is member:
            return None if value is None else _value(member, value, at, strict=strict)
    names = " or ".join(_NAMES[member] for member in members)
    raise BundleError(at, f"must be {names}, not {_kind(value)}")


def _tuple(member: Any, value: object, at: str, *, strict: bool) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise BundleError(at, f"must be an array, not {_kind(value)}")
    if len(value) > MAX_ITEMS:
        raise BundleError(at, f"has {len(value)} items; at most {MAX_ITEMS} are allowed")
    return tuple(_value(member, x, f"{at}[{i}]", strict=strict) for i, x in enumerate(value))


def _texts(value: object, at: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise BundleError(at, f"must be an object, not {_kind(value)}")
    return {_text(key, at): _text(text, _join(at, key)) for key, text in value.items()}


def _int(value: object, at: str) -> int:
    if type(value) is not int:
        raise BundleError(at, f"must be an integer, not {_kind(value)}")
    if not 0 <= value <= MAX_INT:
        raise BundleError(at, f"{value} is out of range; allowed: 0 to 2**53")
    return value


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise BundleError(at, f"must be a string, not {_kind(value)}")
    if len(value) > MAX_STRING_CHARS:
        raise BundleError(at, f"has {len(value)} characters; at most {MAX_STRING_CHARS}")
    if _UNPRINTABLE.search(value):
        raise BundleError(at, f"{shown(value)} has a control character or half a surrogate pair")
    return value


_NAMES = {int: "an integer", str: "a string", type(None): "null"}
_KINDS = {**_NAMES, bool: "a boolean", float: "a fraction", list: "an array", dict: "an object"}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _join(at: str, name: str) -> str:
    name = name if _PLAIN_KEY.fullmatch(name) else shown(name)
    return f"{at}.{name}" if at else name
