"""A whole comparison of runtimes that compute nothing, from the workers to the document."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from trtllm_lite.tools.compare_peers.report import markdown, tables
from trtllm_lite.tools.compare_peers.runner import MACHINE, Findings, Runner, RunOptions
from trtllm_lite.tools.compare_peers.turns import LONG, MANY, ONE, PARTS, Part, Turn
from trtllm_lite.tools.compare_peers.worker_process import WorkerProcess

WINDOWS = tuple(tuple((i + first) % VOCAB for i in range(40)) for first in (0, 5))
TEXTS = Texts(tuple(range(32)) * 100, WINDOWS, None)
FEW = Part("one", (Turn("start", 32, 1), Turn("stream", 128, 5, repeats=2)), 1, 256)
BATCH = Part("many", (Turn("batch", 16, 4, 3),), 3, 256)
BUFFER = 2**16


def fake(name: str, path: str = "model", scored: str | None = None) -> Contender:
    return Contender(name, "fake", sys.executable, path, 8, scored)


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    """A gate that lets everything through; noise has a test of its own."""
    fakes = [Fake().logits(window, "prefill") for window in WINDOWS]
    np.save(tmp_path / "reference.npy", np.stack(fakes))
    reference = tmp_path / "reference.npy"
    return RunOptions(1, 10.0, 1, tmp_path, reference, (FEW, BATCH), BUFFER)


def compare(contenders: Sequence[Contender], options: RunOptions) -> tuple[Findings, list[str]]:
    told: list[str] = []
    return Runner(contenders, TEXTS, options, told.append).run(), told


def test_contenders_alternate_turn_by_turn(options: RunOptions) -> None:
    findings, told = compare([fake("a"), fake("b")], options)
    order = [(s.round, s.turn.split()[0], s.contender) for s in findings.samples]
    assert order == [
        *((0, "start", name) for name in "ab"),
        *((0, "stream", name) for name in ("a", "b", MACHINE, "b", "a", MACHINE)),
        *((1, "start", name) for name in "ba"),
        *((1, "stream", name) for name in ("b", "a", MACHINE, "a", "b", MACHINE)),
        *((0, "batch", name) for name in "ab"),
        *((1, "batch", name) for name in "ba"),
    ]
    assert told[0] == "one: round 1 of 2, start 1x32+1"
    assert told[3] == "one: round 2 of 2, stream 1x128+5"
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
    findings, _ = compare([fake("a")], replace(options, parts=()))
    assert findings.samples == []
    assert findings.quality["a"]["prefill"]["kl"] < 1e-6
    assert findings.quality["a"]["decode"]["kl"] > 1e-4


def test_one_that_cannot_load_is_out_and_named(options: RunOptions) -> None:
    findings, told = compare([fake("a"), fake("b", "broken")], options)
    assert {s.contender for s in findings.samples} == {"a", MACHINE}
    assert findings.errors == [("b", "RuntimeError: broken cannot be loaded")]
    assert "b is out: RuntimeError: broken cannot be loaded" in told
    assert "b" not in findings.quality


def test_one_that_answers_too_little_is_out(options: RunOptions) -> None:
    findings, _ = compare([fake("a", "mute"), fake("b")], options)
    ((name, error),) = findings.errors
    assert name == "a"
    assert "asked for 4 tokens, got 0" in error
    assert {s.contender for s in findings.samples} == {"b", MACHINE}


def test_one_that_is_out_works_no_longer(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Watched(WorkerProcess):
        def close(self) -> None:
            closed.append(self.contender.path)
            super().close()

    monkeypatch.setattr("trtllm_lite.tools.compare_peers.runner.WorkerProcess", Watched)
    few = replace(FEW, turns=(Turn("stream", 128, 5),), rounds=1)
    silent = replace(options, parts=(few,), reference=None)
    compare([fake("a", "mute"), fake("b", "broken"), fake("c")], silent)
    assert closed.index("mute") < closed.index("model")
    assert closed.index("broken") < closed.index("model")


def test_quality_may_be_that_of_another_file(options: RunOptions) -> None:
    quick = replace(options, parts=())
    findings, _ = compare([fake("a", "model", scored="broken")], quick)
    assert findings.errors == [("a", "RuntimeError: broken cannot be loaded")]


def test_what_was_not_quiet_is_tried_again_and_dropped(options: RunOptions) -> None:
    streams = (replace(FEW, turns=FEW.turns[1:], rounds=1),)
    deaf = replace(options, gate=-1.0, retries=2, parts=streams, reference=None)
    findings, _ = compare([fake("a")], deaf)
    for name in ("a", MACHINE):
        tries = [s.attempt for s in findings.samples if s.contender == name]
        assert tries == [0, 1, 2, 0, 1, 2]
    found = document("m", [fake("a")], [], TEXTS, deaf, findings)
    assert dropped(found) == (12, 12)
    assert cells(found) == {"ttft_128": {}, "decode_128": {}, "memory_rate": {}}
    assert "| a | - |" in markdown(found)


def test_the_document_is_json_and_tells_all(options: RunOptions, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"123")
    contender = fake("a", str(tmp_path / "model"))
    findings, _ = compare([contender], options)
    found = json.loads(json.dumps(document("m", [contender], ["x"], TEXTS, options, findings)))
    assert found["contenders"] == [
        {
            **{"name": "a", "peer": "fake", "bits": 8, "version": "fake 1", "bytes": 3},
            "step_bytes": None,
        }
    ]
    rooms = [(part["name"], part["rounds"], part["slots"]) for part in found["options"]["parts"]]
    assert rooms == [("one", 2, 1), ("many", 2, 3)]
    assert len(found["samples"]) == len(findings.samples)
    assert found["machine"]["physical_cores"] > 0
    assert "decode, tokens/s" in markdown(found).lower()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(program.cli, list(arguments))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(program, "RunOptions", partial(RunOptions, buffer=BUFFER))
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
    page = invoke("report", str(output))
    assert page.exit_code == 0, page.output
    assert tables(found, 8).strip() in page.output


def test_memory_is_read_while_nothing_else_runs(options: RunOptions) -> None:
    findings, _ = compare([fake("a")], options)
    rates = [s for s in findings.samples if s.contender == MACHINE]
    assert [s.values.keys() for s in rates] == [{"memory_rate"}] * 4
    assert all(s.values["memory_rate"] > 0 for s in rates)
    assert {s.turn for s in rates} == {"stream 1x128+5"}


def test_parts_come_in_their_own_order_with_their_own_rounds() -> None:
    assert program.parts_named(("long", "quality", "one"), None) == (ONE, LONG)
    assert [part.rounds for part in program.parts_named(tuple(PARTS), 3)] == [3, 3, 3]
    assert program.parts_named(("quality",), None) == ()


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_every_turn_has_room(part: Part) -> None:
    assert max(turn.prompt + turn.new for turn in part.turns) <= part.max_len
    assert max(turn.requests for turn in part.turns) <= part.slots


def test_long_prompts_are_a_part(options: RunOptions) -> None:
    long = Part("long", (Turn("long", 64, 3), Turn("long", 128, 3)), 1, 256, rounds=1)
    findings, _ = compare([fake("a")], replace(options, parts=(long,), reference=None))
    values = [key for s in findings.samples if s.contender == "a" for key in s.values]
    assert values == ["long_ttft_64", "long_decode_64", "long_ttft_128", "long_decode_128"]
    assert set(findings.memory["a"]) == {"long"}
    assert MANY.name not in findings.memory["a"]


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
