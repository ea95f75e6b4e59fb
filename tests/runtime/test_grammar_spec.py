"""Descriptions of grammars: what they keep, and what they refuse by the name of the field."""

import json
from typing import Any

import pytest

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.grammar_spec import MAX_BYTES, MAX_DEPTH, GrammarSpec
from trtllm_lite.runtime.sampling_params import SamplingParams


def nested(levels: int, *, through: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {through: schema}
    return schema


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {"const": "é"}}}
    spec = GrammarSpec.json_schema(schema)
    assert spec.kind == "json_schema"
    assert list(json.loads(spec.text)["properties"]) == ["z", "a"]
    assert json.loads(spec.text) == schema


def test_the_field_that_errors_name_is_no_part_of_what_is_described() -> None:
    one, other = (GrammarSpec.regex("a+", param=name) for name in ("regex", "guided_regex"))
    assert one == other
    assert len({one, other}) == 1
    assert one != GrammarSpec.regex("a*")
    assert one != GrammarSpec.lark("a+")


def test_nesting_is_bounded() -> None:
    assert GrammarSpec.json_schema(nested(MAX_DEPTH)).text.count("{") == MAX_DEPTH
    for levels in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(RequestError, match=f"^response_format: .* over {MAX_DEPTH} levels"):
            GrammarSpec.json_schema(nested(levels), param="response_format")
    deep: list[Any] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(RequestError, match="levels"):
        GrammarSpec.json_schema({"enum": deep})


def test_size_is_bounded_in_bytes() -> None:
    assert GrammarSpec.regex("é" * (MAX_BYTES // 2)).num_bytes == MAX_BYTES
    with pytest.raises(RequestError, match=f"^grammar: the regex has {MAX_BYTES + 2} bytes"):
        GrammarSpec.regex("é" * (MAX_BYTES // 2 + 1))
    with pytest.raises(RequestError, match="bytes"):
        GrammarSpec.choice(["x" * MAX_BYTES])


@pytest.mark.parametrize("schema", [None, True, [], "{}", 1])
def test_only_an_object_is_a_schema(schema: Any) -> None:
    with pytest.raises(RequestError, match=r"^f: got a schema of type \w+; allowed: an object"):
        GrammarSpec.json_schema(schema, param="f")


@pytest.mark.parametrize(
    "schema", [{"minimum": float("nan")}, {"enum": [object()]}, {("a",): 1}, {"enum": [b""]}]
)
def test_a_schema_has_to_be_json(schema: Any) -> None:
    with pytest.raises(RequestError, match=r"^f: the schema is no JSON"):
        GrammarSpec.json_schema(schema, param="f")


def test_the_librarys_own_switches_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="keyword x-guidance is not supported"):
        GrammarSpec.json_schema({"x-guidance": {"lenient": True}})


@pytest.mark.parametrize("options", [[], (), "abc", None, [""], ["a", 1], {"a": 1}])
def test_choices_are_non_empty_texts(options: Any) -> None:
    with pytest.raises(RequestError, match=r"^f: got .* non-empty list of non-empty strings"):
        GrammarSpec.choice(options, param="f")


@pytest.mark.parametrize("text", ["", None, 5])
@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_a_text_has_to_be_there(kind: str, text: Any) -> None:
    make = GrammarSpec.regex if kind == "regex" else GrammarSpec.lark
    with pytest.raises(RequestError, match=f"^f: got .* for a {kind}"):
        make(text, param="f")


def test_an_unknown_kind_is_refused() -> None:
    kind: Any = "ebnf"
    with pytest.raises(RequestError, match=r"^grammar: got kind 'ebnf'; allowed: json_object, "):
        GrammarSpec(kind, "a")
    with pytest.raises(RequestError, match=r"for a json_object; allowed: none"):
        GrammarSpec("json_object", "{}")


def test_parameters_take_a_grammar_and_nothing_else_there() -> None:
    spec = GrammarSpec.json_object()
    assert SamplingParams(grammar=spec) == SamplingParams(grammar=GrammarSpec.json_object())
    wrong: Any = {"type": "object"}
    with pytest.raises(RequestError, match=r"^grammar: got dict; allowed: a GrammarSpec or None"):
        SamplingParams(grammar=wrong)


def test_an_answer_that_never_ends_has_no_grammar() -> None:
    with pytest.raises(RequestError, match=r"^ignore_eos: got True with a grammar"):
        SamplingParams(grammar=GrammarSpec.json_object(), ignore_eos=True)
