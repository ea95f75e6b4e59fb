"""Schemas made stricter: what the library would let through, it does not any more."""

from datetime import date, timedelta
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.errors import RequestError, StepError
from trtllm_lite.runtime.grammar import GrammarState
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.json_schema_rules import tightened
from trtllm_lite.runtime.llguidance_grammar import LLGuidanceCompiler

EOS = 0


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte: every text has one spelling in tokens."""
    vocab = {"<eos>": EOS}
    vocab |= {text: i + 1 for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return raw


BYTES = make_tokenizer()
JSON = LLGuidanceCompiler(BYTES.to_str(), BYTES.get_vocab_size(with_added_tokens=True), (EOS,))


def start(schema: dict[str, Any]) -> GrammarState:
    return JSON.compile(GrammarSpec.json_schema(schema, param="response_format")).start()


def takes(schema: dict[str, Any], text: str) -> bool:
    state = start(schema)
    try:
        for token in BYTES.encode(text).ids:
            state.advance(token)
    except StepError:
        return False
    return state.may_stop()


def text_of(form: str, value: str) -> bool:
    return takes({"type": "string", "format": form}, f'"{value}"')


def test_days_are_those_of_the_calendar() -> None:
    for year in (1900, 2000, 2023, 2024, 2100):
        known = {date(year, 1, 1) + timedelta(days=n) for n in range(366)}
        for month in range(14):
            # The ends of months, where days stop being days.
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                there = text in {each.isoformat() for each in known if each.year == year}
                assert text_of("date", text) == there, text


@pytest.mark.parametrize(
    ("form", "value", "valid"),
    [
        ("date", "2024-1-01", False),
        ("date", "24-01-01", False),
        ("time", "23:59:59Z", True),
        ("time", "00:00:00.123+14:30", True),
        ("time", "23:59:60Z", False),
        ("time", "24:00:00Z", False),
        ("time", "12:60:00Z", False),
        ("time", "12:00:00", False),
        ("time", "12:00:00+24:00", False),
        ("date-time", "2024-02-29T12:00:00Z", True),
        ("date-time", "2023-02-29T12:00:00Z", False),
        ("date-time", "1990-12-31T15:59:60-08:00", False),
    ],
)
def test_times_are_those_of_every_day(form: str, value: str, valid: bool) -> None:
    assert text_of(form, value) is valid


def test_a_format_is_kept_beside_what_else_a_string_has_to_be() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^20", "allOf": [{"maxLength": 10}]}
    assert takes(schema, '"2024-02-29"')
    assert not takes(schema, '"2023-02-29"')
    assert not takes(schema, '"1999-01-01"')


NAMES: dict[str, Any] = {
    "properties": {"foo": {"type": "integer"}, "a/b": {"type": "integer"}},
    "patternProperties": {"^é": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("name", "escaped"),
    [("foo", r"f\u006fo"), ("foo", r"\u0066oo"), ("a/b", r"a\/b"), ("éa", r"\u00e9a")],
)
def test_a_property_cannot_be_written_in_disguise(name: str, escaped: str) -> None:
    assert takes(NAMES, f'{{"{name}":1}}')
    assert not takes(NAMES, f'{{"{name}":"x"}}')
    assert not takes(NAMES, f'{{"{escaped}":"x"}}')
    assert takes(NAMES, '{"other":"x"}')


def test_a_name_that_is_written_twice_counts_once() -> None:
    one = {"type": "object", "minProperties": 1}
    assert takes(one, '{"a":1}')
    assert not takes(one, "{}")
    two: dict[str, Any] = {"type": "object", "required": ["a"], "minProperties": 2}
    assert takes(two, '{"a":1,"b":2}')
    assert not takes(two, '{"a":1}')
    assert not takes(two, '{"a":1,"a":2}')


def test_text_may_hold_quotes_and_breaks_and_every_character() -> None:
    assert takes({"type": "string"}, r'"a\"\\\n\t\r\b\fé😀/"')
    assert not takes({"type": "string"}, r'"\ud800"')


@pytest.mark.parametrize(
    ("pattern", "space"),
    [(r"^\s$", True), (r"^[\s]$", True), (r"^\S$", False), (r"^[^\s]$", False)],
)
def test_white_space_is_that_of_ecma(pattern: str, space: bool) -> None:
    schema = {"type": "string", "pattern": pattern}
    for char in (" ", "\u00a0", "\ufeff", "\u2028", "\u3000"):
        assert takes(schema, f'"{char}"') is space
    for char in ("a", "\u0085", "\u200b"):
        assert takes(schema, f'"{char}"') is not space


def test_an_escaped_backslash_is_no_class() -> None:
    schema = {"type": "string", "pattern": r"^\\s$"}
    assert tightened(schema)["pattern"] == r"^\\s$"
    assert takes(schema, r'"\\s"')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
        ({"properties": {"a": {"contentMediaType": "application/json"}}}, "contentMediaType"),
        ({"items": [{"anyOf": [{"contentSchema": {}}]}]}, "contentSchema"),
        ({"$defs": {"a": {"$id": "b", "$ref": "#"}}}, "$id"),
        ({"minProperties": 2}, "minProperties"),
        ({"minProperties": 3, "required": ["a"]}, "minProperties"),
        (
            {"minProperties": 2, "patternProperties": {"a": {}}, "additionalProperties": False},
            "minProperties",
        ),
        ({"const": "a\x00"}, "U+0000"),
        ({"properties": {"a\x7f": {}}}, "U+007F"),
    ],
)
def test_what_would_be_passed_over_is_refused_by_name(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match="cannot be used") as caught:
        start(schema)
    assert named in str(caught.value)
    assert caught.value.param == "response_format"


def test_a_schema_with_a_name_may_be_a_reference() -> None:
    schema = {"$id": "http://a.test/b", "$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}
    assert takes(schema, "null")
    assert not takes(schema, "1")


def test_data_and_names_are_no_keywords() -> None:
    schema: dict[str, Any] = {
        "enum": [{"format": "date", "contentEncoding": "x", "pattern": r"\s"}],
        "default": {"contentEncoding": 1},
        "properties": {
            "const": {"pattern": r"\s"},
            "contentEncoding": {"format": "date"},
            "format": {"const": {"format": "time"}},
        },
    }
    made = tightened(schema)
    assert made["enum"] == schema["enum"]
    assert made["default"] == schema["default"]
    assert made["properties"]["const"]["pattern"] != r"\s"
    assert made["properties"]["contentEncoding"]["allOf"]
    assert made["properties"]["format"] == schema["properties"]["format"]
    assert "allOf" not in schema["properties"]["contentEncoding"]
