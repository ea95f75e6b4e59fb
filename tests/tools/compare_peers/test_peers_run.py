"""A whole comparison of runtimes that compute nothing, from the workers to the document."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.compare_peers import __main__ as program
from trtllm_lite.tools.compare_peers.adapters.fake import PACE, VOCAB, Fake
from trtllm_lite.tools.compare_peers.contenders import Contender
from trtllm_lite.tools.compare_peers.document import cells, document, dropped
from trtllm_lite.tools.compare_peers.prompts import Texts, write_texts
from trtllm_lite.tools.compare_peers.report import markdown
from trtllm_lite.tools.compare_peers.runner import Findings, Runner, RunOptions
from trtllm_lite.tools.compare_peers.turns import Turn

WINDOWS = tuple(tuple((i + first) % VOCAB for i in range(40)) for first in (0, 5))
TEXTS = Texts(tuple(range(32)) * 100, WINDOWS, None)
ONE = (Turn("start", 32, 1), Turn("stream", 128, 5, repeats=2))
MANY = (Turn("batch", 16, 4, 3),)


def fake(name: str, path: str = "model", scored: str | None = None) -> Contender:
    return Contender(name, "fake", sys.executable, path, 8, scored)


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    """A gate that lets everything through; noise has a test of its own."""
    fakes = [Fake().logits(window, "prefill") for window in WINDOWS]
    np.save(tmp_path / "reference.npy", np.stack(fakes))
    reference = tmp_path / "reference.npy"
    return RunOptions(1, 2, 10.0, 1, tmp_path, reference, one=ONE, many=MANY)


def compare(contenders: Sequence[Contender], options: RunOptions) -> tuple[Findings, list[str]]:
    told: list[str] = []
    return Runner(contenders, TEXTS, options, told.append).run(), told


def test_contenders_alternate_turn_by_turn(options: RunOptions) -> None:
    findings, told = compare([fake("a"), fake("b")], options)
    order = [(s.round, s.turn.split()[0], s.contender) for s in findings.samples]
    assert order == [
        *((0, "start", name) for name in "ab"),
        *((0, "stream", name) for name in "abba"),
        *((1, "start", name) for name in "ba"),
        *((1, "stream", name) for name in "baab"),
        *((0, "batch", name) for name in "ab"),
        *((1, "batch", name) for name in "ba"),
    ]
    assert told[:2] == ["one: round 1 of 2", "one: round 2 of 2"]
    assert findings.errors == []


def test_figures_are_those_of_the_runtime(options: RunOptions) -> None:
    findings, _ = compare([fake("a")], options)
    values = [dict(s.values) for s in findings.samples]
    assert values[0].keys() == {"load", "first_token"}
    assert 0 <= values[0]["load"] < values[0]["first_token"]
    assert 0 < values[1]["decode_128"] <= 1 / PACE
    assert values[1]["ttft_128"] >= PACE
    assert 0 < values[-1]["total_3"] <= 3 / PACE
    assert findings.versions == {"a": "fake 1"}
    assert set(findings.memory["a"]) == {"one", "many"}


def test_quality_is_measured_on_each_path(options: RunOptions) -> None:
    findings, _ = compare([fake("a")], replace(options, one=(), many=()))
    assert findings.samples == []
    assert findings.quality["a"]["prefill"]["kl"] < 1e-6
    assert findings.quality["a"]["decode"]["kl"] > 1e-4


def test_one_that_cannot_load_is_out_and_named(options: RunOptions) -> None:
    findings, told = compare([fake("a"), fake("b", "broken")], options)
    assert {s.contender for s in findings.samples} == {"a"}
    assert findings.errors == [("b", "RuntimeError: broken cannot be loaded")]
    assert "b is out: RuntimeError: broken cannot be loaded" in told
    assert "b" not in findings.quality


def test_one_that_answers_too_little_is_out(options: RunOptions) -> None:
    findings, _ = compare([fake("a", "mute"), fake("b")], options)
    ((name, error),) = findings.errors
    assert name == "a"
    assert "asked for 4 tokens, got 0" in error
    assert {s.contender for s in findings.samples} == {"b"}


def test_quality_may_be_that_of_another_file(options: RunOptions) -> None:
    quick = replace(options, one=(), many=())
    findings, _ = compare([fake("a", "model", scored="broken")], quick)
    assert findings.errors == [("a", "RuntimeError: broken cannot be loaded")]


def test_what_was_not_quiet_is_tried_again_and_dropped(options: RunOptions) -> None:
    deaf = replace(options, rounds=1, gate=-1.0, retries=2, one=ONE[1:], many=(), reference=None)
    findings, _ = compare([fake("a")], deaf)
    assert [s.attempt for s in findings.samples] == [0, 1, 2, 0, 1, 2]
    found = document("m", [fake("a")], [], TEXTS, deaf, findings)
    assert dropped(found) == (6, 6)
    assert cells(found) == {"ttft_128": {}, "decode_128": {}}
    assert "| a | - |" in markdown(found)


def test_the_document_is_json_and_tells_all(options: RunOptions, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"123")
    contender = fake("a", str(tmp_path / "model"))
    findings, _ = compare([contender], options)
    found = json.loads(json.dumps(document("m", [contender], ["x"], TEXTS, options, findings)))
    assert found["contenders"] == [
        {"name": "a", "peer": "fake", "bits": 8, "version": "fake 1", "bytes": 3}
    ]
    assert found["options"]["rounds"] == 2
    assert len(found["samples"]) == len(findings.samples)
    assert found["machine"]["physical_cores"] > 0
    assert "decode, tokens/s" in markdown(found).lower()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(program.cli, list(arguments))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "smollm2"
    folder.mkdir(parents=True)
    write_texts(Texts(tuple(range(32)) * 200, (), None), folder / "texts.json")
    return tmp_path


def test_the_command_runs_what_is_there_and_records_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "catalogue", lambda *_: ([fake("a 1"), fake("b 2")], ["no c"]))
    output = home / "out.json"
    arguments = ["--folder", str(home), "--rounds", "1", "--gate", "1", "--part", "one"]
    result = invoke("run", *arguments, "--only", "b", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("no c\n")
    found = json.loads(output.read_text())
    assert [c["name"] for c in found["contenders"]] == ["b 2"]
    assert {s["turn"].split()[0] for s in found["samples"]} == {"start", "stream"}
    assert invoke("report", str(output)).output == markdown(found) + "\n"


def test_a_run_without_preparation_says_what_to_do(tmp_path: Path) -> None:
    result = invoke("run", "--folder", str(tmp_path), "--output", "x.json")
    assert isinstance(result.exception, UsageError)
    assert "run prepare first" in str(result.exception)


def test_preparing_nothing_says_what_to_do(tmp_path: Path) -> None:
    result = invoke("prepare", "--folder", str(tmp_path))
    assert isinstance(result.exception, UsageError)
    assert "put the model there" in str(result.exception)


def test_a_bad_bundle_is_refused(home: Path) -> None:
    arguments = ("--folder", str(home), "--ours", "int8=x", "--output", "x.json")
    result = invoke("run", *arguments)
    assert isinstance(result.exception, UsageError)
    assert "--ours: got 'int8=x'" in str(result.exception)
