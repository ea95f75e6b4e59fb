"""Answers that a grammar of tool calls lets through, and what the parsers read in them."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.server.parsers.events import (
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merged,
)
from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS, ToolFormat
from trtllm_lite.runtime.server.parsers.output_parser import OutputParser
from trtllm_lite.runtime.server.parsers.reasoning import ReasoningSplitter
from trtllm_lite.runtime.server.parsers.tool_grammar import (
    MAX_CALLS,
    FunctionTool,
    Thought,
    tool_grammar,
)

llguidance = pytest.importorskip("llguidance")

SPECIAL = ("<eos>", "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<think>", "</think>")
IDS = {text: 256 + i for i, text in enumerate(SPECIAL)}
TOKENS = [bytes([i]) for i in range(256)] + [text.encode() for text in SPECIAL]
WEATHER = FunctionTool(
    "get",
    {
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"enum": [1, 12]}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
)
TOOLS = (
    WEATHER,
    FunctionTool("get_time"),
    FunctionTool("a-b.c", {"type": "object", "maxProperties": 0}),
)
FORMATS = list(TOOL_FORMATS.values())
formats = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
special = pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])


class Bytes:
    """A tokenizer of single bytes and a few special tokens."""

    eos_token_id = IDS["<eos>"]
    bos_token_id = None
    tokens = TOKENS
    special_token_ids = tuple(IDS.values())

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def table() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def start(table: Any, spec: GrammarSpec) -> Any:
    source = llguidance.LLMatcher.grammar_from_lark(spec.text)
    matcher = llguidance.LLMatcher(table, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def encode(text: str, special: bool) -> list[int]:
    ids = []
    while text:
        marker = next((each for each in IDS if special and text.startswith(each)), None)
        piece = marker or text[0]
        ids += [IDS[marker]] if marker else list(piece.encode())
        text = text.removeprefix(piece)
    return ids


def accepts(table: Any, spec: GrammarSpec, text: str, special: bool) -> bool:
    matcher = start(table, spec)
    ids = encode(text, special)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def sample(table: Any, spec: GrammarSpec, seed: int) -> str:
    """A random text of the grammar."""
    matcher, chance, ids = start(table, spec), random.Random(seed), []
    for _ in range(4000):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(TOKENS)])
        may = [int(i) for i in allowed if i != IDS["<eos>"]]
        if not may or (matcher.is_accepting() and chance.random() < 0.3):
            break
        ids.append(chance.choice(may))
        assert matcher.consume_token(ids[-1])
    assert matcher.is_accepting()
    return b"".join(TOKENS[i] for i in ids).decode()


def read(form: ToolFormat, text: str, *, opened: bool | None = None) -> list[tuple[str, str]]:
    """The calls, where the answer holds nothing else."""
    reasoning = None if opened is None else ReasoningSplitter(opened=opened)
    parser = OutputParser(reasoning, form.parser([tool.name for tool in TOOLS]))
    events = merged([*parser.feed(text), *parser.finish()])
    events = [event for event in events if not isinstance(event, ReasoningDelta)]
    found = []
    for begin, arguments in zip(events[::2], events[1::2], strict=True):
        assert isinstance(begin, ToolCallStart)
        assert isinstance(arguments, ToolCallArguments)
        found.append((begin.name, arguments.delta))
    return found


def written(form: ToolFormat, calls: Sequence[tuple[str, str]]) -> str:
    """Calls as the family's chat templates write them."""
    key = "parameters" if form.name == "llama3_json" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {args}}}' for name, args in calls]
    if form.name == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if form.name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if form.name == "mistral_args":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{args}" for name, args in calls)
    return "; ".join(objects)


@formats
@special
def test_takes_what_templates_write(form: ToolFormat, special: bool, table: Any) -> None:
    spec = tool_grammar(form.form, TOOLS, special_tokens=IDS if special else {})
    calls = [("get", '{"unit": "F", "days": 12}'), ("get_time", "{}"), ("a-b.c", "{}")]
    for some in (calls[:1], calls, calls[::-1], calls * 10):
        assert accepts(table, spec, written(form, some), special)
    assert accepts(table, spec, written(form, [("get", '{"unit":"C","days":1}')]), special)


@formats
@special
def test_parsers_read_all_that_it_lets_through(form: ToolFormat, special: bool, table: Any) -> None:
    spec = tool_grammar(form.form, TOOLS, special_tokens=IDS if special else {})
    seen = set()
    for seed in range(12):
        calls = read(form, sample(table, spec, seed))
        assert 1 <= len(calls) <= MAX_CALLS
        for name, arguments in calls:
            seen.add(name)
            values = json.loads(arguments)
            if name == "get":
                assert values["unit"] in ("C", "F")
                assert values["days"] in (1, 12)
            assert len(values) == (2 if name == "get" else 0)
    assert len(seen) > 1


@formats
def test_refuses_all_else(form: ToolFormat, table: Any) -> None:
    spec = tool_grammar(form.form, TOOLS, special_tokens={})
    good = written(form, [("get", '{"unit": "C", "days": 1}')])
    assert accepts(table, spec, good, False)
    for bad in (
        "",
        "Hello",
        f"Hello {good}",
        f"{good} and",
        good.replace('"C"', '"K"'),
        good.replace('"unit": "C", ', ""),
        good.replace('"days": 1', '"days": 1, "more": 1'),
        good.replace('"days": 1', '"days":  1'),
        good.replace("get", "set"),
        good.replace("get", "get_time"),
        written(form, [("get_time", "{}")] * (MAX_CALLS + 1)),
    ):
        assert not accepts(table, spec, bad, False), bad


@formats
def test_a_named_tool_is_called_once(form: ToolFormat, table: Any) -> None:
    spec = tool_grammar(form.form, TOOLS, name="get_time", special_tokens={})
    assert accepts(table, spec, written(form, [("get_time", "{}")]), False)
    assert not accepts(table, spec, written(form, [("get_time", "{}")] * 2), False)
    assert not accepts(table, spec, written(form, [("a-b.c", "{}")]), False)


@formats
def test_without_parallel_there_is_one_call(form: ToolFormat, table: Any) -> None:
    spec = tool_grammar(form.form, TOOLS, parallel=False, special_tokens={})
    assert accepts(table, spec, written(form, [("a-b.c", "{}")]), False)
    assert not accepts(table, spec, written(form, [("a-b.c", "{}")] * 2), False)


@formats
@special
def test_reasoning_may_come_first(form: ToolFormat, special: bool, table: Any) -> None:
    ids = IDS if special else {}
    call = written(form, [("get_time", "{}")])
    possible = tool_grammar(form.form, TOOLS, special_tokens=ids, thought=Thought.POSSIBLE)
    opened = tool_grammar(form.form, TOOLS, special_tokens=ids, thought=Thought.OPENED)
    thought = "\nHm {a} < b\n</think>\n\n"
    assert accepts(table, possible, call, special)
    assert accepts(table, possible, f"<think>{thought}{call}", special)
    assert not accepts(table, possible, thought + call, special)
    assert accepts(table, opened, thought + call, special)
    assert not accepts(table, opened, call, special)
    assert not accepts(table, opened, f"{thought}Hello", special)
    assert read(form, thought + call, opened=True) == [("get_time", "{}")]


def test_special_tokens_are_no_text(table: Any) -> None:
    form = TOOL_FORMATS["mistral_args"]
    spec = tool_grammar(form.form, TOOLS, special_tokens=IDS)
    assert not accepts(table, spec, written(form, [("get_time", "{}")]), False)


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "é", 'a"b', "a\n"])
def test_names_of_tools(name: str) -> None:
    with pytest.raises(RequestError, match="tools: got a function named") as error:
        FunctionTool(name)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "parameters", [{"type": "string"}, {"type": ["object", "null"]}, {"x-guidance": {}}]
)
def test_parameters_of_tools(parameters: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^tools: "):
        FunctionTool("get", parameters)


def test_a_choice_of_tools_that_cannot_be_met() -> None:
    form = TOOL_FORMATS["hermes"].form
    with pytest.raises(RequestError, match="tools: got an empty list"):
        tool_grammar(form, (), special_tokens={})
    with pytest.raises(RequestError, match="tools: got two functions named get"):
        tool_grammar(form, (WEATHER, WEATHER), special_tokens={})
    with pytest.raises(RequestError, match=r"tool_choice: got the function 'x'; allowed: get$"):
        tool_grammar(form, (WEATHER,), name="x", special_tokens={})
