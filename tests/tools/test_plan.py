"""plan: the numbers of its tables and its document, on tiny models and drawn machines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.exporter.contract import graph_spec
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.outline import Outline
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import KVLayer, KVSpec, Phase
from trtllm_lite.runtime.planning.cpu import NATIVE, NATIVE_EXACT, ORT_FLOAT, ORT_INTEGER
from trtllm_lite.runtime.planning.gpus import find_gpu, read_gpus
from trtllm_lite.runtime.planning.memory import GraphWeights
from trtllm_lite.runtime.planning.workload import Workload
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.tools.cli import cli
from trtllm_lite.tools.doctor_checks.gpu_facts import Gpu, GpuFacts
from trtllm_lite.tools.plan_bundle import bundle_workloads
from trtllm_lite.tools.plan_gpus import named_gpus
from trtllm_lite.tools.plan_machines import gpu_hosts, kernels_for, refusals
from trtllm_lite.tools.plan_report import document
from trtllm_lite.tools.plan_subject import Subject, Wanted

WORK = Workload(
    weight_bytes=10 * 2**30,
    step_bytes=9 * 2**30,
    body_products=4 * 10**9,
    head_products=10**9,
    vocab_size=1_000,
    layers=(KVLayer(8, 128),) * 32,
    kv_dtype="float16",
    attention_width=32 * 4_096,
)
PHASES: tuple[Phase, ...] = ("prefill", "decode", "extend")
GRAPHS = tuple(
    graph_spec(phase, KVSpec("float16", WORK.layers), 1_000, multi_token=phase != "decode")
    for phase in PHASES
)
WEIGHTS = GraphWeights(
    vectors=dict.fromkeys(PHASES, 10),
    matrices={"prefill": 7 * 2**30, "decode": 6 * 2**30, "extend": 7 * 2**30},
    all_matrices=9 * 2**30,
)
SUBJECT = Subject(
    name="m",
    kind="checkpoint",
    model_type="llama",
    num_parameters=5 * 10**9,
    target="tensorrt",
    dtype="float16",
    quantize="none",
    max_model_len=4_096,
    max_num_seqs=8,
    hidden_size=4_096,
    workload=WORK,
    native=None,
    graphs=GRAPHS,
    weights=WEIGHTS,
    scratch_width=28_672,
    query_width=4_096,
    host_bytes={"build": 5},
)
WANTED = Wanted(gpu="l4", max_num_batched_tokens=256)
SHORT = ("--input-len", "8", "--output-len", "8")
HERE = Gpu(0, "NVIDIA L4", "sm89", 22 * 2**30, 21 * 2**30)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *args])


def planned(*args: str) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU of round numbers in place of this one."""
    monkeypatch.setattr("trtllm_lite.tools.bandwidth.typical_bandwidth", lambda *a: 1e9)
    monkeypatch.setattr("trtllm_lite.tools.bandwidth.product_rate", lambda *a: 1e12)
    monkeypatch.setattr("trtllm_lite.runtime.host.available_memory", lambda: 2**30)


def test_a_gpu_s_memory_is_added_up() -> None:
    gpus = named_gpus("l4")
    made = document(SUBJECT, gpu_hosts(gpus, SUBJECT), {}, WANTED)
    memory = made["machines"][0]["memory"]
    capacity, chunk = 4_096 + 256, 256 + 16
    slot = 2 * 8 * 128 * 32 * 2 * capacity
    run_bytes = 4 * chunk * 2 * 28_672 * 2
    logits = 4 * 4 * 32 * 1_000
    over_cache = 2 * 4 * capacity * 4_096 * 2 + 4 * 4 * chunk * 4_096 * 2
    scratch = max(run_bytes, over_cache) + logits
    assert memory["slot_bytes"] == slot
    assert memory["scratch_bytes"] == scratch
    used = memory["reserved_bytes"] + 20 * 2**30 + 30 + scratch + 8 * slot
    assert memory["used_bytes"] == used
    assert memory["fits"] is False
    left = find_gpu("l4").memory_bytes - (used - 8 * slot)
    assert memory["most_requests"] == left // slot
    assert made["is_estimate"] is True


def test_chunks_are_those_of_the_runtime() -> None:
    default = replace(WANTED, max_num_batched_tokens=None)
    for target, chunk in (("tensorrt", 512), ("cuda", 256)):
        subject = replace(SUBJECT, target=target)
        made = document(subject, gpu_hosts(named_gpus("l4"), subject), {}, default)
        assert made["options"]["max_num_batched_tokens"] == chunk
        slot = made["machines"][0]["memory"]["slot_bytes"]
        assert slot == WORK.kv_token_bytes * (4_096 + chunk)


def test_a_gpu_s_times_are_its_limits() -> None:
    gpu = find_gpu("l4")
    made = document(SUBJECT, gpu_hosts((gpu,), SUBJECT), {}, WANTED)
    alone = made["machines"][0]["speed"][0]
    read = WORK.step_bytes + WORK.kv_read_bytes(WANTED.input_len + WANTED.output_len // 2)
    assert alone["tpot"] == pytest.approx(read / gpu.bandwidth)
    flops = WORK.prompt_flops(512) + WORK.prompt_attention_flops(512)
    assert alone["ttft"] == pytest.approx(flops / gpu.flops["float16"])
    assert made["machines"][0]["times_are"] == "limit"
    assert [point["requests"] for point in made["machines"][0]["speed"]] == [1, 4, 8]
    assert [point["fits"] for point in made["machines"][0]["speed"]] == [True, False, False]


def test_all_gpus_are_listed_but_those_that_cannot() -> None:
    eight_bits = replace(SUBJECT, dtype="bfloat16", quantize="fp8_block32")
    gpus = named_gpus("all")
    names = {host.name for host in gpu_hosts(gpus, eight_bits)}
    refused = refusals(gpus, eight_bits)
    assert names | refused.keys() == {gpu.name for gpu in read_gpus()}
    assert names == {gpu.name for gpu in read_gpus() if gpu.sm >= 89}
    assert "does not compute in bfloat16" in refused["t4"]
    assert "fp8 weights from SM 89 on" in refused["a100"]
    with pytest.raises(UsageError, match=r"--gpu t4: NVIDIA T4 does not compute in bfloat16"):
        gpu_hosts(named_gpus("t4"), eight_bits)


def test_the_gpu_of_this_machine(outlined: list[ExportOptions], drivers: list[GpuFacts]) -> None:
    for_gpu = ("m", "--target", "tensorrt")
    none = run(*for_gpu)
    assert none.exit_code == 2
    assert "--gpu current: no NVIDIA GPU is seen here (no NVIDIA driver); name one" in none.stderr
    drivers.append(GpuFacts((HERE,)))
    for args in (for_gpu, ("m", "--gpu", "current"), ("m", "--gpu", "l4,CURRENT")):
        (found,) = planned(*args)["machines"]
        assert found["name"] == "l4"
    assert planned("m", "--gpu", "current")["machines"][0]["memory"]["total_bytes"] == 22 * 2**30
    drivers.append(GpuFacts((replace(HERE, name="NVIDIA L5"),)))
    strange = run("m", "--gpu", "current")
    assert strange.exit_code == 2
    assert "--gpu: got 'NVIDIA L5'; allowed: b200" in strange.stderr


def test_names_of_a_list_count_once() -> None:
    assert [gpu.name for gpu in named_gpus("l4,H100, rtx 4090,L4")] == ["l4", "h100", "rtx-4090"]
    assert named_gpus(None) == ()


def test_a_bundle_on_this_machine(tiny_bundle: Path, machine: None) -> None:
    made = planned(str(tiny_bundle), "--input-len", "8", "--output-len", "8", "--max-num-seqs", "2")
    manifest = open_bundle(tiny_bundle).manifest
    memory = made["machines"][0]["memory"]
    assert made["model"]["kind"] == "bundle"
    assert memory["kv_token_bytes"] == manifest.kv.bytes_per_token
    assert memory["slot_bytes"] == manifest.kv.bytes_per_token * (
        manifest.limits.max_model_len + 256
    )
    assert memory["weight_bytes"] == pytest.approx(
        (tiny_bundle / manifest.weights).stat().st_size, rel=0.2
    )
    assert memory["total_bytes"] == 2**30
    assert made["machines"][0]["rates"] == {"bytes_per_second": 1e9, "flops": 1e12}
    assert made["machines"][0]["times_are"] == "expected"
    tables = run(str(tiny_bundle), "--input-len", "8", "--output-len", "8").stdout
    assert "Estimate, not run" in tables
    assert "Times (expected) of 8 prompt and 8 new tokens" in tables


def test_a_bundle_s_other_caches(
    tiny_bundle: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = bundle_workloads(open_bundle(tiny_bundle))
    native = replace(plain, kv_dtype="float16")
    monkeypatch.setattr("trtllm_lite.tools.plan_bundle.bundle_workloads", lambda _: (plain, native))
    kinds = ("float16", "float32", "int8")
    monkeypatch.setattr("trtllm_lite.runtime.native_weights.cache_dtypes", lambda _: kinds[:2])
    monkeypatch.setattr("trtllm_lite.tools.plan_machines.kernels_for", lambda *_args: NATIVE)
    for asked, kind in ((None, "float16"), ("auto", "float16"), ("float32", "float32")):
        given = () if asked is None else ("--kv-dtype", asked)
        memory = planned(str(tiny_bundle), *SHORT, *given)["machines"][0]["memory"]
        assert memory["kv_dtype"] == kind
        assert memory["kv_token_bytes"] == replace(plain, kv_dtype=kind).kv_token_bytes
    refused = run(str(tiny_bundle), *SHORT, "--kv-dtype", "int8")
    assert refused.exit_code == 2
    assert "kv_dtype: got 'int8'; the bundle has float16, float32" in refused.stderr


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[GpuFacts]:
    """What the driver of this machine says: the last of the list."""
    said = [GpuFacts(problem="no NVIDIA driver")]
    facts = "trtllm_lite.tools.doctor_checks.gpu_facts.read_gpus"
    monkeypatch.setattr(facts, lambda: said[-1])
    return said


@pytest.fixture
def outlined(monkeypatch: pytest.MonkeyPatch) -> list[ExportOptions]:
    """Replaces the way through the export; collects what was asked of it."""
    asked: list[ExportOptions] = []

    def outline(options: ExportOptions, progress: Progress) -> Outline:
        asked.append(options)
        return Outline(
            model_type="llama",
            num_parameters=1_000,
            hidden_size=8,
            max_model_len=4_096,
            target=options.target,
            dtype=options.dtype,
            quantize=options.quantize,
            workload=replace(WORK, weight_bytes=100),
            native=None,
            weights=GraphWeights(
                vectors=dict.fromkeys(PHASES, 5),
                matrices={"prefill": 75, "decode": 65, "extend": 85},
                all_matrices=95,
            ),
            graphs=GRAPHS,
            largest_tensor_bytes=30,
            query_width=8,
            widest=16,
            calibrated=options.quantize == "int4",
        )

    monkeypatch.setattr("trtllm_lite.exporter.outline.outline", outline)
    return asked


def test_a_checkpoint_on_gpus(outlined: list[ExportOptions]) -> None:
    made = planned("m", "--gpu", "l4,t4", "--target", "cuda", "--max-model-len", "4K")
    assert [m["name"] for m in made["machines"]] == ["l4", "t4"]
    assert [m["memory"]["weight_bytes"] for m in made["machines"]] == [100, 100]
    assert made["host_bytes"].keys() == {"export", "verify"}
    (asked,) = outlined
    found = (asked.model, asked.target, asked.dtype, asked.quantize, asked.max_model_len)
    assert found == ("m", "cuda", "float16", "none", 4_096)
    assert asked.dry_run


def test_plans_hold_their_weights_each(outlined: list[ExportOptions]) -> None:
    made = planned("m", "--gpu", "l4")
    assert made["machines"][0]["memory"]["weight_bytes"] == 80 + 70 + 90
    assert made["model"]["weight_bytes"] == 100
    assert outlined[0].target == "tensorrt"
    assert made["host_bytes"]["build"] == (240 + 13 * 32) * 2**20 + 3 * 90
    shown = run("m", "--gpu", "l4").stdout
    assert "100 B, 2.4 times: once for each graph" in shown
    assert "held once with --share-weights or --single-engine" in shown
    assert "held once" not in run("m", "--gpu", "l4", "--single-engine").stdout


def test_weights_that_are_held_once(outlined: list[ExportOptions]) -> None:
    shared = planned("m", "--gpu", "l4", "--share-weights")["machines"][0]["memory"]
    assert shared["weight_bytes"] == 95 + 3 * 5
    single = planned("m", "--gpu", "l4", "--single-engine")["machines"][0]["memory"]
    assert single["weight_bytes"] == 90
    for args, message in (
        (("--share-weights", "--single-engine"), "leave one of them out"),
        (("--share-weights", "--quantize", "int4"), "--share-weights: this bundle has int4"),
        (("--share-weights", "--target", "cuda"), "--target cuda has no plans of TensorRT"),
        (("--single-engine", "--target", "cuda"), "--target cuda has no plans of TensorRT"),
    ):
        result = run("m", "--gpu", "l4", *args)
        assert result.exit_code == 2
        assert message in result.stderr


def test_what_is_not_counted_is_said(outlined: list[ExportOptions], machine: None) -> None:
    result = run("m", "--quantize", "int4")
    assert "weights that calibration keeps in 8 bits are not in it" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gpu", "foo"), "--gpu: got 'foo'; allowed: b200, "),
        (("--gpu", "a10g"), "--gpu: got 'a10g'; did you mean a10"),
        ((*SHORT, "--rounding", "exact"), "--rounding exact: only the native kernels round so"),
        (("--max-num-seqs", "4000"), "--max-num-seqs: got 4000; the bundle was made for at most"),
        (("--gpu", "l4"), "a bundle for cpu runs on a CPU; leave it out"),
        (("--quantize", "int8"), "--quantize: "),
        (("--kv-dtype", "int8"), "--kv-dtype: got int8; only the native kernels have such a cache"),
        (
            ("--max-model-len", "1M"),
            "--max-model-len: got 1048576; the bundle was made for at most ",
        ),
        (("--input-len", "1M"), "--input-len + --output-len: got 1048576 + 128"),
    ],
)
def test_options_that_do_not_go_with_a_bundle(
    tiny_bundle: Path, args: tuple[str, ...], message: str
) -> None:
    result = run(str(tiny_bundle), *args)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--target", "cuda"), "--gpu current: no NVIDIA GPU is seen here"),
        (("--gpu", "l4", "--threads", "2"), "--threads: it is for a CPU"),
        (("--gpu", "l4", "--rounding", "fast"), "--rounding: it is for a CPU"),
        (("--gpu", "l4", "--target", "cpu"), "--gpu: --target cpu runs on a CPU"),
        (("--gpu", "l4", "--quantize", "int3"), "--quantize: got 'int3'; allowed: none, "),
    ],
)
def test_options_that_do_not_go_together(
    tiny_checkpoint: Path, drivers: list[GpuFacts], args: tuple[str, ...], message: str
) -> None:
    result = run(str(tiny_checkpoint), *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_kernels_are_those_that_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_lite.runtime import kernels

    assert kernels_for(False, "none") is ORT_FLOAT
    assert kernels_for(False, "int8_block32") is ORT_INTEGER
    for library, expected in ((Path("x"), NATIVE), (None, ORT_INTEGER)):
        found = kernels.Kernels(library, "")
        monkeypatch.setattr("trtllm_lite.runtime.kernels.find_kernels", lambda found=found: found)
        assert kernels_for(True, "int8_block32") is expected
    with pytest.raises(UsageError, match="--rounding exact"):
        kernels_for(True, "int8_block32", "exact")
    monkeypatch.setattr(
        "trtllm_lite.runtime.kernels.find_kernels", lambda: kernels.Kernels(Path("x"), "")
    )
    assert kernels_for(True, "int8_block32", "exact") is NATIVE_EXACT
