"""JSON that comes from outside: UTF-8 only, no duplicate keys, no NaN or Infinity, bounded numbers.

Python's own reader takes all of these, and a reader in another language may take them otherwise;
what two readers can see differently is refused.
"""

import json
import math

MAX_DIGITS = 20


def parse(data: bytes) -> object:
    """The value of one JSON document. Raises ValueError, whose text is one line.

    Objects become dict, arrays list. Integers of more than 20 digits and floats that overflow are
    refused. Nesting is bounded by the interpreter's recursion limit.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def shown(value: object, limit: int = 60) -> str:
    """`value` as one printable line of bounded length, for messages."""
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    text = text.encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= limit + 2 else f"{text[:limit]}..."


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"duplicate key {shown(key)}")
        made[key] = value
    return made


def _constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)
