"""JSON schemas through llguidance: what they take, what is refused by name, what cannot harm."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.errors import RequestError, StepError
from trtllm_lite.runtime.grammar_compiler import CachedCompiler
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.llguidance_grammar import LLGuidanceCompiler

EOS = 0


def make_tokenizer() -> tokenizers.Tokenizer:
    """All bytes, and a few tokens that join the marks of JSON."""
    merges = [("{", '"'), ('"', ":"), ('"', "}"), ("t", "r")]
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocab = {"<eos>": EOS} | {text: i + 1 for i, text in enumerate(texts)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return raw


BYTES = make_tokenizer()
JSON = LLGuidanceCompiler(BYTES.to_str(), BYTES.get_vocab_size(with_added_tokens=True), (EOS,))


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the text, in the tokenizer's own tokens, is a whole one of the schema's."""
    state = JSON.compile(GrammarSpec.json_schema(schema)).start()
    try:
        for token in BYTES.encode(text).ids:
            state.advance(token)
    except StepError:
        return False
    return state.may_stop()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": ["boolean", "null"]},
                "next": {"$ref": "#/$defs/node"},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
UNION = {"anyOf": [{"const": "é水"}, {"type": "number", "minimum": -2, "maximum": 2}]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (PERSON, '{"name":"Jo","age":41}', '{"name":"Jo"}'),
        (PERSON, '{"name": "é水", "age": 0}', '{"name":"Jo","age":131}'),
        (PERSON, '{"name":"","age":7,"tags":["x","y"]}', '{"name":"","age":7,"tags":["z"]}'),
        (PERSON, '{\n  "name": "a",\n  "age": 1\n}', '{"name":"a","age":1,"more":1}'),
        (LIST, '{"v":null,"next":{"v":true}}', '{"v":null,"next":{}}'),
        (UNION, '"é水"', '"é"'),
        (UNION, "-1.5", "2.5"),
        ({"type": "object"}, '{"a":{"b":[1,{}]}}', "[1]"),
        ({"type": "string", "pattern": "^a+$"}, '"aaa"', '"ab"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2024-13-01"'),
    ],
)
def test_a_schema_takes_valid_texts_and_no_other(
    schema: dict[str, Any], valid: str, invalid: str
) -> None:
    assert takes(schema, valid)
    assert not takes(schema, invalid)
    assert not takes(schema, valid[:-1])
    assert not takes(schema, valid + " ")


@pytest.mark.parametrize("between", ["\t", "\r\n", "\n\n", " " * 40, "\n" + " " * 40])
def test_white_space_is_what_indents_and_never_goes_on(between: str) -> None:
    schema: dict[str, Any] = {"type": "object"}
    assert takes(schema, '{"a":\n    1}')
    assert not takes(schema, f'{{"a":{between}1}}')


def written(schema: dict[str, Any], rng: random.Random) -> str:
    """A text by a writer that knows nothing of JSON, and prefers what might end."""
    state = JSON.compile(GrammarSpec.json_schema(schema)).start()
    tokens: list[int] = []
    while not state.may_stop() or rng.random() < 0.3:
        allowed = [int(i) for i in np.flatnonzero(state.allowed()) if i != EOS]
        if not allowed:
            break
        closing = [i for i in allowed if BYTES.id_to_token(i) in ('"', "}", '"}', "]")]
        tokens.append(rng.choice(closing if closing and rng.random() < 0.4 else allowed))
        state.advance(tokens[-1])
    return BYTES.decode(tokens)


@pytest.mark.parametrize("schema", [PERSON, LIST, UNION])
def test_whatever_a_writer_does_the_text_fits_the_schema(schema: dict[str, Any]) -> None:
    for seed in range(12):
        text = written(schema, random.Random(seed))
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "hiccup"}, "hiccup"),
        ({"type": 123}, "type"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"properties": {"a": {"if": {}, "then": {}}}}, "if"),
        ({"type": "string", "format": "no-such"}, "no-such"),
        ({"type": "string", "pattern": "("}, "("),
        ({"type": "string", "pattern": "a(?=b)"}, "look"),
        ({"$ref": "http://example.com/schema.json"}, "example.com"),
        ({"type": "object", "properties": "x"}, "properties"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ],
)
def test_what_a_schema_needs_and_nobody_does_is_refused_by_name(
    schema: dict[str, Any], named: str
) -> None:
    spec = GrammarSpec.json_schema(schema, param="response_format")
    with pytest.raises(RequestError) as caught:
        JSON.compile(spec)
    message = str(caught.value)
    assert message.startswith("response_format: the json_schema cannot be used: ")
    assert named in message
    assert len(message) < 500
    assert "\n" not in message


def bombs() -> dict[str, GrammarSpec]:
    wide: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(8):
        deep = {"anyOf": [deep, {"type": "array", "items": deep}]}
    return {
        "repetition": GrammarSpec.regex("a{1,100000}"),
        "nested repetition": GrammarSpec.regex("(?:(?:(?:a{1,99}){1,99}){1,99}){1,99}"),
        "backtracking": GrammarSpec.regex("(a+)+$"),
        "alternation": GrammarSpec.regex("|".join(f"a{{{i}}}b" for i in range(800))),
        "wide": GrammarSpec.json_schema(wide),
        "deep": GrammarSpec.json_schema(deep),
        "long": GrammarSpec.json_schema({"enum": [f"{i:050d}" for i in range(3000)]}),
        "lengths": GrammarSpec.json_schema({"type": "string", "maxLength": 10**9}),
        "items": GrammarSpec.json_schema({"type": "array", "minItems": 10**9}),
    }


@pytest.mark.parametrize("name", list(bombs()))
def test_hostile_grammars_end_as_a_grammar_or_a_refusal(name: str) -> None:
    compiler = CachedCompiler(lambda: JSON)
    try:
        state = compiler.compile(bombs()[name]).start()
    except RequestError:
        state = None
    if state is not None:
        assert state.allowed().any()
    assert compiler.compile(GrammarSpec.regex("a")).start().allowed().any()


def test_what_a_schema_says_to_the_library_counts_for_nothing() -> None:
    lenient = GrammarSpec("json_schema", '{"x-guidance":{"lenient":true},"not":{}}')
    with pytest.raises(RequestError, match="not"):
        JSON.compile(lenient)
