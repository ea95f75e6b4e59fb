"""bench: which runs in which order, and figures against a plain computation."""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from trtllm_lite.runtime import bundle as bundle_module
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import StepError, UsageError
from trtllm_lite.runtime.host_tuning import Setting, Tuning
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.manifest import (
    FileEntry,
    GraphSpec,
    KVSpec,
    Limits,
    Manifest,
    ModelFacts,
    Quantization,
    Source,
)
from trtllm_lite.runtime.native_table import (
    GRAPHS,
    TABLE_NAME,
    VERSION,
    Copy,
    NativeTable,
    to_json,
)
from trtllm_lite.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from trtllm_lite.runtime.planning.together import Prediction
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.step_timer import (
    PARTS,
    NullTimer,
    StepRecorder,
    StepTimer,
    StepTimes,
)
from trtllm_lite.tools.bench_report import Limit, report, result_table, summary
from trtllm_lite.tools.bench_run import (
    WARM_UP,
    BenchOptions,
    Point,
    Sample,
    grid,
    prompts,
    run_bench,
    schedule,
)
from trtllm_lite.tools.cli import cli
from trtllm_lite.tools.doctor_checks.gpu_facts import Gpu, GpuFacts

VOCAB = 50
TUNING = Tuning(Setting(3, "off"), "remembered")


@dataclass
class FakeLLM:
    """Takes 1 s to the first token and 0.1 s for each further one, on a clock of its own."""

    error: str | None = None
    now: float = 10.0
    calls: list[tuple[list[list[int]], SamplingParams]] = field(default_factory=list)
    config: EngineConfig = field(default_factory=lambda: EngineConfig(4, 128, 64, 512))
    timer: StepTimer = field(default_factory=NullTimer)
    tuning: Tuning | None = TUNING
    device: ClassVar[str] = "cpu"

    def time_steps(self, timer: StepTimer) -> None:
        self.timer = timer

    def generate(
        self,
        prompts: None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: list[list[int]],
    ) -> list[RequestOutput]:
        assert params is not None
        assert params.max_tokens is not None
        self.calls.append((prompt_token_ids, params))
        if isinstance(self.timer, StepRecorder):
            rows = len(prompt_token_ids)
            self.timer.steps.append(StepTimes(rows, rows, 0, 0, (0.125,) * len(PARTS)))
        start, first = self.now, self.now + 1.0
        end = self.now = first + 0.1 * (params.max_tokens - 1)
        metrics = RequestMetrics(start, start, first, end, params.max_tokens)
        choice = CompletionOutput(0, "", (1,) * params.max_tokens, "length", error=self.error)
        return [
            RequestOutput(str(i), None, tuple(ids), [choice], True, metrics)
            for i, ids in enumerate(prompt_token_ids)
        ]


OPTIONS = BenchOptions((8, 4), (5,), (1, 3), repeats=2, warmup=1, seed=7)
counts = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(counts, counts, counts, st.integers(1, 3), st.integers(0, 2))
def test_every_point_runs_as_often_as_asked_in_rounds_over_the_grid(
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    concurrencies: tuple[int, ...],
    repeats: int,
    warmup: int,
) -> None:
    options = BenchOptions(inputs, outputs, concurrencies, repeats, warmup)
    points, runs = grid(options), list(schedule(options))
    assert set(points) == {Point(i, o, c) for i in inputs for o in outputs for c in concurrencies}
    assert [point for _, point in runs] == points * (warmup + repeats)
    rounds = [WARM_UP] * warmup + list(range(repeats))
    assert [number for number, _ in runs] == [n for n in rounds for _ in points]


def test_requests_are_as_the_grid_says_and_warm_ups_are_left_out() -> None:
    llm = FakeLLM()
    samples = run_bench(llm, VOCAB, OPTIONS, NoProgress())
    assert [len(runs) for runs in samples.values()] == [2] * 4
    assert len(llm.calls) == 12
    shapes = [(len(ids), len(ids[0])) for ids, _ in llm.calls]
    assert shapes == [(1, 8), (3, 8), (1, 4), (3, 4)] * 3
    for ids, params in llm.calls:
        assert (params.max_tokens, params.ignore_eos, params.temperature) == (5, True, 0.0)
        assert all(0 <= token < VOCAB for row in ids for token in row)
    assert len({json.dumps(ids) for ids, _ in llm.calls}) == 12


def test_figures_are_those_of_the_clock() -> None:
    samples = run_bench(FakeLLM(), VOCAB, OPTIONS, NoProgress())
    sample = samples[Point(8, 5, 3)][0]
    assert sample.ttft == pytest.approx((1.0,) * 3)
    assert sample.tpot == pytest.approx((0.1,) * 3)
    assert sample.throughput == pytest.approx(15 / 1.4)


def test_the_same_seed_gives_the_same_prompts() -> None:
    point = Point(8, 5, 2)
    assert prompts(point, VOCAB, (1, 2)) == prompts(point, VOCAB, (1, 2))
    assert prompts(point, VOCAB, (1, 2)) != prompts(point, VOCAB, (2, 2))


def test_a_failed_request_ends_the_bench() -> None:
    with pytest.raises(StepError, match="a measured request failed: broken"):
        run_bench(FakeLLM(error="broken"), VOCAB, OPTIONS, NoProgress())


def test_a_grid_that_does_not_fit_is_refused_with_numbers() -> None:
    OPTIONS.check(13)
    with pytest.raises(UsageError, match=r"got 8 \+ 5 = 13 tokens; allowed: 12"):
        OPTIONS.check(12)


def test_steps_are_taken_apart_only_when_asked_for() -> None:
    llm = FakeLLM()
    plain = run_bench(llm, VOCAB, OPTIONS, NoProgress())
    assert all(sample.steps == () for runs in plain.values() for sample in runs)
    asked = run_bench(llm, VOCAB, replace(OPTIONS, breakdown=True), NoProgress())
    rows = [[s.decode_rows for s in sample.steps] for runs in asked.values() for sample in runs]
    assert rows == [[1], [1], [3], [3], [1], [1], [3], [3]]
    assert isinstance(llm.timer, NullTimer)


def make_bundle(folder: Path) -> Bundle:
    (folder / "bundle.json").write_text("{}")
    manifest = Manifest(
        model=ModelFacts("llama", "L", 10, 1, 8, VOCAB, None, ()),
        source=Source("tiny", "gguf"),
        target="cpu",
        dtype="float32",
        quantization=Quantization(),
        limits=Limits(4, 128),
        kv=KVSpec("float32", ()),
        graphs=(),
        weights="weights.bin",
        files=(),
    )
    return Bundle(folder, manifest)


def test_the_report_holds_what_is_needed_to_compare(tmp_path: Path) -> None:
    samples = run_bench(FakeLLM(), VOCAB, OPTIONS, NoProgress())
    engine = {"threads": 2, "spin": False}
    document = report(make_bundle(tmp_path), OPTIONS, engine, Limit(4_000, 100_000.0), samples)
    assert json.loads(json.dumps(document, allow_nan=False))["schema"] == "trtllm-lite-bench/1"
    assert document["bundle"]["sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert document["options"]["seed"] == 7
    assert document["options"]["threads"] == 2
    assert document["limit"]["tpot"] == pytest.approx(0.04)
    assert set(document["machine"]) >= {"cpu", "physical_cores", "logical_cpus", "memory_bytes"}
    assert {"trtllm-lite", "python", "numpy"} <= set(document["versions"])
    result = document["results"][1]
    assert (result["input_len"], result["output_len"], result["concurrency"]) == (8, 5, 3)
    assert result["tpot"]["count"] == 6
    assert result["fraction_of_limit"] == pytest.approx(0.4)
    assert result_table(document).rows[1] == (
        *("8", "5", "3", "1000.0 [1000.0, 1000.0]", "100.0 [100.0, 100.0]"),
        *("10.7 [10.7, 10.7]", "-", "-", "40.00", "40%"),
    )
    assert "40.00 ms a token" in summary(document)[1]


def test_guesses_are_counted_over_all_runs(tmp_path: Path) -> None:
    sample = Sample((1.0,), (0.1,), 2.0, 10)
    runs = {
        Point(8, 5, 1): [
            replace(sample, draft_tokens=8, accepted_tokens=5),
            replace(sample, draft_tokens=4, accepted_tokens=1),
        ],
        Point(8, 5, 3): [replace(sample, draft_tokens=3, accepted_tokens=3)],
    }
    document = report(make_bundle(tmp_path), OPTIONS, {"threads": 1}, Limit(4_000, 1e5), runs)
    found = [(r["draft_tokens"], r["accepted_tokens"]) for r in document["results"]]
    assert found == [(12, 6), (3, 3)]
    assert summary(document)[-1] == "Speculation: 9 of 15 guesses right"


def test_a_run_counts_the_guesses_of_its_requests() -> None:
    class Guessing(FakeLLM):
        def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
            made = super().generate(*args, **kwargs)
            return [
                replace(r, metrics=replace(r.metrics, num_draft_tokens=4, num_accepted_tokens=3))
                for r in made
            ]

    samples = run_bench(Guessing(), VOCAB, OPTIONS, NoProgress())
    counts = {p: {(s.draft_tokens, s.accepted_tokens) for s in runs} for p, runs in samples.items()}
    assert counts == {p: {(4 * p.concurrency, 3 * p.concurrency)} for p in samples}


def test_what_is_not_known_is_null_and_a_dash(tmp_path: Path) -> None:
    options = BenchOptions((4,), (1,), (1,))
    samples = run_bench(FakeLLM(), VOCAB, options, NoProgress())
    document = report(make_bundle(tmp_path), options, {"threads": 1}, Limit(4_000, None), samples)
    assert document["results"][0]["tpot"] is None
    assert document["results"][0]["fraction_of_limit"] is None
    assert result_table(document).rows[0][4:] == ("-", "1.0 [1.0, 1.0]", *"----")
    assert "not known" in summary(document)[1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Replaces the bundle, the engine and the bandwidth; collects how the engine was opened."""
    calls: list[dict[str, Any]] = []

    @contextmanager
    def open_llm(*args: Any, **kwargs: Any) -> Iterator[FakeLLM]:
        calls.append(inspect.signature(LLM).bind(*args, **kwargs).arguments)
        yield FakeLLM()

    manifest = make_bundle(tmp_path).manifest
    files = (FileEntry("weights.bin", 9_000, "0" * 64),)
    graphs = (GraphSpec("decode", "decode.onnx", (), ()),)
    bundle = Bundle(tmp_path, replace(manifest, files=files, graphs=graphs))
    weights = [("w", 1_000), ("rotary.0.cos", 500)]
    made = [numpy_helper.from_array(np.zeros(n, np.float32), name) for name, n in weights]
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [], made)), tmp_path / "decode.onnx")
    module = ModuleType("trtllm_lite.runtime.llm")
    vars(module)["LLM"] = open_llm
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("trtllm_lite.runtime.bundle.open_bundle", lambda *a, **k: bundle)
    monkeypatch.setattr("trtllm_lite.tools.bandwidth.read_bandwidth", lambda *a: 100_000.0)
    monkeypatch.setattr("trtllm_lite.tools.bench_prediction.predictions", lambda *a: {})
    return calls


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "b", *args])


@pytest.mark.parametrize("name", ["NVIDIA L4", "NVIDIA X1"])
def test_a_gpu_is_measured_beside_its_own_limits(
    opened: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    facts = GpuFacts((Gpu(0, name, "sm89", 2**34, 0),))
    monkeypatch.setattr(FakeLLM, "device", "cuda:0")
    monkeypatch.setattr("trtllm_lite.tools.doctor_checks.gpu_facts.read_gpus", lambda: facts)
    planned = {Point(8, 5, 1): Prediction(0.5, 0.05, 20.0, "memory")}
    asked: list[str] = []

    def predicted(bundle: Bundle, points: Any, gpu: Any) -> dict[Point, Prediction]:
        asked.append(gpu.name)
        return planned

    monkeypatch.setattr("trtllm_lite.tools.bench_prediction.gpu_predictions", predicted)
    document = json.loads(
        run("--input-len", "8", "--output-len", "5", "--concurrency", "1", "--json").stdout
    )
    (result,) = document["results"]
    if name == "NVIDIA L4":
        assert asked == ["l4"]
        assert result["predicted"]["tpot"] == 0.05
        assert document["limit"]["tpot"] == pytest.approx(4_000 / 300e9)
        assert summary(document)[1] == "NVIDIA L4; planned times are the least that is possible"
    else:
        assert asked == []
        assert (result["predicted"], document["limit"]["tpot"]) == (None, None)
        assert "the GPU is not in the table" in summary(document)[-1]


def test_the_command_writes_one_document_to_file_and_stdout(
    opened: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    grid_options = ("--input-len", "8,4", "--output-len", "5", "--concurrency", "1,3")
    result = run(*grid_options, "--threads", "2", "--json", "--output", str(file))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert json.loads(file.read_text()) == document
    assert [(r["input_len"], r["concurrency"]) for r in document["results"]] == [
        *((8, 1), (8, 3), (4, 1), (4, 3)),
    ]
    assert document["limit"]["weight_bytes"] == 4_000
    assert document["options"]["max_num_batched_tokens"] == 64
    assert document["options"]["repeats"] == 3
    settings = {name: document["options"][name] for name in ("threads", "spin", "tuning")}
    assert settings == {"threads": 3, "spin": "off", "tuning": "remembered"}
    (engine,) = opened
    assert engine["max_num_seqs"] == 3
    assert engine["intra_op_num_threads"] == 2
    assert engine["enable_prefix_caching"] is False


@pytest.mark.parametrize(("kernels", "read"), [("auto", 900), ("onnxruntime", 4_000)])
def test_the_limit_is_of_the_weights_that_are_read(
    opened: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    read: int,
) -> None:
    table = NativeTable(VERSION, 1_000, (), (Copy(0, 0, 60), Copy(60, 60, 40)))
    (tmp_path / TABLE_NAME).write_text(json.dumps(to_json(table)))
    plain = bundle_module.open_bundle(tmp_path)
    files = tuple(FileEntry(name, 1, "0" * 64) for name in (TABLE_NAME, *GRAPHS.values()))
    native = replace(plain, manifest=replace(plain.manifest, files=files))
    monkeypatch.setattr(bundle_module, "open_bundle", lambda *a, **k: native)
    grid_options = ("--input-len", "8", "--output-len", "5", "--concurrency", "1")
    document = json.loads(run(*grid_options, "--kernels", kernels, "--json").stdout)
    assert document["limit"]["weight_bytes"] == read


def test_the_command_shows_a_table(opened: list[dict[str, Any]]) -> None:
    result = run("--input-len", "8", "--output-len", "5", "--concurrency", "1")
    assert "TPOT ms" in result.stdout
    assert "100.0 [100.0, 100.0]" in result.stdout
    assert "round 3 of 3 ... " in result.stderr


def test_the_breakdown_is_a_table_more_and_part_of_the_document(
    opened: list[dict[str, Any]],
) -> None:
    grid_options = ("--input-len", "8", "--output-len", "5", "--concurrency", "1,3", "--breakdown")
    shown = run(*grid_options)
    assert "all but run  750.000 [750.000, 750.000]" in shown.stdout
    assert "8 in, 5 out, 3 at once" in shown.stdout
    document = json.loads(run(*grid_options, "--json").stdout)
    assert document["options"]["breakdown"] is True
    for result, rows in zip(document["results"], (1, 3), strict=True):
        decode = result["breakdown"]["decode"]
        assert decode["decode_rows"]["median"] == rows
        assert decode["seconds"]["total"]["median"] == 0.125 * len(PARTS)
    plain = json.loads(run(*grid_options[:-1], "--json").stdout)
    assert "breakdown" not in plain["results"][0]


def test_what_cannot_work_is_refused_before_any_run(opened: list[dict[str, Any]]) -> None:
    assert "does not exist" in run("--output", "/not/there/x.json").stderr
    assert "= 164 tokens; allowed: 128" in run("--input-len", "100").stderr
    assert opened == []
