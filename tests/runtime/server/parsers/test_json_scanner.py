"""The character scanner against Python's own JSON reader."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.server.parsers.json_scanner import MAX_DEPTH, At, JsonScanner

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON, max_size=4)
PIECES = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        '"',
        "\\",
        "\\u00e",
        "\\n",
        " ",
        "\n",
        "\x01",
        "\t",
        "é",
        "a",
        '"k":',
        "0",
        "1",
        "-",
        ".",
        "e",
        "+",
        "true",
        "false",
        "null",
        "nul",
        "NaN",
        "01",
        '"v"',
    ]
)


def end_of_object(text: str) -> int | None:
    """Characters up to and with the object's end; None where the scanner stops or wants more."""
    scanner = JsonScanner()
    for i, char in enumerate(text):
        if not scanner.step(char):
            return None
        if scanner.at is At.END:
            return i + 1
    return None


def refuse(text: str) -> float:
    raise ValueError(text)


def is_object(text: str) -> bool:
    if not text.startswith("{") or not text.endswith("}"):
        return False
    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@given(OBJECTS, st.sampled_from([None, 0, 2]), st.booleans(), st.text(max_size=3))
@settings(max_examples=60, deadline=None)
def test_an_object_ends_where_it_ends(
    value: dict[str, object], indent: int | None, ascii_only: bool, rest: str
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert end_of_object(text + rest) == len(text)


@given(st.lists(PIECES, max_size=10))
@settings(max_examples=250, deadline=None)
def test_takes_what_python_takes(pieces: list[str]) -> None:
    text = "{" + "".join(pieces)
    ends = [n for n in range(1, len(text) + 1) if is_object(text[:n])]
    assert end_of_object(text) == (ends[0] if ends else None)


@given(OBJECTS, st.data())
@settings(max_examples=120, deadline=None)
def test_takes_a_damaged_object_when_python_does(
    value: dict[str, object], data: st.DataObject
) -> None:
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:place] + data.draw(PIECES | st.just("")) + text[place + 1 :]
    ends = [n for n in range(1, len(damaged) + 1) if is_object(damaged[:n])]
    assert end_of_object(damaged) == (ends[0] if ends else None)


@pytest.mark.parametrize("number", ["0", "-0", "10", "1.5", "-1.5e10", "1E+2", "2e-07", "0.0"])
def test_numbers(number: str) -> None:
    text = f'{{"a":{number}}}'
    assert is_object(text)
    assert end_of_object(text) == len(text)


@pytest.mark.parametrize(
    "number", ["00", "-", "+1", ".5", "1.", "1.e5", "1e", "1e+", "1e5.", "--1", "0x1", "Infinity"]
)
def test_no_numbers(number: str) -> None:
    text = f'{{"a":{number}}}'
    assert not is_object(text)
    assert end_of_object(text) is None


def test_nesting_is_bounded() -> None:
    def nested(depth: int) -> str:
        return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    assert end_of_object(nested(MAX_DEPTH)) == len(nested(MAX_DEPTH))
    assert end_of_object(nested(MAX_DEPTH + 1)) is None


@pytest.mark.parametrize("text", ["[]", " {}", '"a"', "1", "null"])
def test_only_objects(text: str) -> None:
    assert end_of_object(text) is None
