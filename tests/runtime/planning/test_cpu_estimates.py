"""The CPU's estimates against what was measured on one: all recorded runs of our own engine."""

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import harmonic_mean, median

import pytest

from trtllm_lite.runtime.manifest import KVLayer
from trtllm_lite.runtime.planning.cpu import (
    NATIVE,
    NATIVE_EXACT,
    ORT_FLOAT,
    ORT_INTEGER,
    Cpu,
    Kernels,
)
from trtllm_lite.runtime.planning.together import predict
from trtllm_lite.runtime.planning.workload import Workload

MEASURED = Path(__file__).parents[3] / "docs" / "measurements"
EXACT = "peers-smollm2: trtllm-lite int8-exact"
PRODUCTS = 2 * 107e9
"""Float32 multiplications and additions a second of the two cores that ran it all."""
FULL, WINDOW = KVLayer(1, 256), KVLayer(1, 256, sliding_window=512)


def workload(
    body: int, vocab: int, hidden: int, layers: tuple[KVLayer, ...], heads: int
) -> Workload:
    """Of a model whose embedding is its output layer; bytes of weights are set by the run."""
    return Workload(
        weight_bytes=0,
        step_bytes=0,
        body_products=body,
        head_products=vocab * hidden,
        vocab_size=vocab,
        layers=layers,
        kv_dtype="float16",
        attention_width=len(layers) * heads,
    )


MODELS = {
    "smollm2": workload(106_168_320, 49_152, 576, (KVLayer(3, 64),) * 30, 576),
    "gemma3": workload(100_270_080, 262_144, 640, ((WINDOW,) * 5 + (FULL,)) * 3, 1_024),
    "llama1b": workload(973_078_528, 32_000, 2_048, (KVLayer(8, 64),) * 16, 2_048),
}


@dataclass(frozen=True)
class Run:
    """Medians of one contender of one file, and the memory rate over all of the run."""

    name: str
    model: str
    step_bytes: int
    kernels: Kernels
    rate: float
    values: dict[str, float]

    @property
    def cpu(self) -> Cpu:
        return Cpu(self.rate, PRODUCTS, self.kernels)

    @property
    def work(self) -> Workload:
        return replace(MODELS[self.model], step_bytes=self.step_bytes)


def kernels_of(version: str) -> Kernels:
    if "onnxruntime kernels" in version:
        return ORT_INTEGER
    return NATIVE_EXACT if "exact rounding" in version else NATIVE


def runs() -> list[Run]:
    found = []
    for path in sorted(MEASURED.glob("peers-*.json")):
        document = json.loads(path.read_text())
        values: dict[tuple[str, str], list[float]] = defaultdict(list)
        for sample in document["samples"]:
            for name, value in sample["values"].items() if sample["kept"] else ():
                values[sample["contender"], name].append(value)
        rate = harmonic_mean(values["this machine", "memory_rate"])
        for contender in document["contenders"]:
            if contender["step_bytes"] is not None:
                name = contender["name"]
                kernels = kernels_of(contender["version"])
                ours = {key: median(v) for (who, key), v in values.items() if who == name}
                size = contender["step_bytes"]
                label = f"{path.stem}: {name}"
                found.append(Run(label, document["model"], size, kernels, rate, ours))
    return found


RUNS = pytest.mark.parametrize("run", runs(), ids=lambda run: run.name)


def test_there_is_something_to_compare_with() -> None:
    assert len(runs()) >= 8
    assert {run.model for run in runs()} == set(MODELS)


@RUNS
def test_a_decoded_token_takes_what_is_estimated(run: Run) -> None:
    for context in (128, 1_024):
        name = f"decode_{context}"
        if name in run.values:
            estimate = run.cpu.step(run.work, rows=1, context=context + 32)
            assert estimate.seconds == pytest.approx(1 / run.values[name], rel=0.25)
            assert estimate.bound == "memory"


@RUNS
def test_a_prompt_takes_about_what_is_estimated(run: Run) -> None:
    for tokens in (128, 512, 1_024):
        name = f"ttft_{tokens}"
        if name in run.values:
            estimate = run.cpu.prompt(run.work, tokens)
            assert estimate.seconds == pytest.approx(run.values[name], rel=0.3)


@RUNS
def test_requests_together_give_about_the_tokens_that_are_estimated(run: Run) -> None:
    for requests in (4, 8, 16):
        name = f"total_{requests}"
        if name in run.values:
            estimate = predict(run.work, run.cpu, requests, 128, 64)
            assert estimate.tokens_per_second == pytest.approx(run.values[name], rel=0.35)


def test_exact_rounding_has_rates_of_its_own() -> None:
    (run,) = (run for run in runs() if run.name == EXACT)
    assert run.kernels is NATIVE_EXACT
    for requests in (4, 8, 16):
        measured = run.values[f"total_{requests}"]
        estimate = predict(run.work, run.cpu, requests, 128, 64)
        assert estimate.tokens_per_second == pytest.approx(measured, rel=0.25)
    fast = replace(run, kernels=NATIVE)
    assert fast.cpu.step(run.work, 16, 128).seconds < run.cpu.step(run.work, 16, 128).seconds
    rounded_once = predict(run.work, fast.cpu, 16, 128, 64).tokens_per_second
    assert rounded_once > measured, "the constants of the other rounding promise too much"
    assert abs(rounded_once - measured) > abs(estimate.tokens_per_second - measured)
    # A lone request waits for the weights, and prompts have many tokens.
    assert fast.cpu.step(run.work, 1, 128) == run.cpu.step(run.work, 1, 128)
    assert fast.cpu.prompt(run.work, 512) == run.cpu.prompt(run.work, 512)


def test_float_weights_take_what_is_estimated() -> None:
    document = json.loads((MEASURED / "smollm2-135m-cpu.json").read_text())
    limit = document["limit"]
    smollm2 = MODELS["smollm2"]
    work = replace(smollm2, step_bytes=limit["weight_bytes"], kv_dtype="float32")
    cpu = Cpu(limit["bytes_per_second"], PRODUCTS, ORT_FLOAT)
    for result in document["results"]:
        lengths = (result["input_len"], result["output_len"])
        estimate = predict(work, cpu, result["concurrency"], *lengths)
        assert estimate.tpot == pytest.approx(result["tpot"]["median"], rel=0.25)


def test_more_tokens_rows_and_context_take_longer() -> None:
    cpu, work = Cpu(40e9, PRODUCTS, NATIVE), MODELS["smollm2"]
    steps = [cpu.step(work, rows, context).seconds for rows in (1, 2, 8) for context in (0, 500)]
    assert steps == sorted(steps)
    assert cpu.step(work, 64, 4_000).bound == "compute"
    prompts = [cpu.prompt(work, tokens).seconds for tokens in (1, 100, 1_000)]
    assert prompts == sorted(prompts)
