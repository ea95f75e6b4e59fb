"""build: what it says and what it leaves, on a bundle of the `tensorrt` target."""

import json
import shutil
import sys
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result

from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.engines import gpus
from trtllm_lite.runtime.engines.memory import ledger_before
from trtllm_lite.runtime.engines.profiles import engine_limits, most_logits, profiles
from trtllm_lite.runtime.engines.store import Machine, Need, find_engine
from trtllm_lite.runtime.engines.trt_module import MODULES, TensorRT, installed_tensorrt
from trtllm_lite.runtime.engines.weight_inputs import shared_weights
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.tools.cli import cli


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["--progress", "plain", "build", *map(str, args)])


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in float16, of the target that plans are built from."""
    output = tmp_path_factory.mktemp("plans") / "tiny-llama"
    options = ExportOptions(
        model=str(tiny_checkpoint), output=output, target="tensorrt", verify=False, max_num_seqs=4
    )
    export(options, NoProgress())
    return output


def weights_of(path: Path) -> int:
    """Bytes of the weights that a graph has in another file."""
    kept = onnx.load(path, load_external_data=False).graph.initializer
    outside = [t for t in kept if t.data_location == onnx.TensorProto.EXTERNAL]
    return sum(int(e.value) for t in outside for e in t.external_data if e.key == "length")


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    """TensorRT-RTX, which builds without a GPU."""
    found = [trt for trt in installed_tensorrt() if trt.flavour == "tensorrt_rtx"]
    if not found:
        pytest.skip("TensorRT-RTX is not installed: pip install 'trtllm-lite[rtx]'")
    return found[0]


@pytest.mark.parametrize("way", [None, "--share-weights", "--single-engine"])
def test_plan_says_before_what_build_counts(
    bundle: Path, tiny_checkpoint: Path, way: str | None
) -> None:
    opened = open_bundle(bundle)
    limits = engine_limits(opened.manifest.limits, 2, None, 32)
    largest = {
        graph.phase: most_logits(profiles(graph, limits))
        for graph in opened.manifest.graphs
        if way != "--single-engine" or graph.phase == "extend"
    }
    files = [opened.graph_path(graph.phase).read_bytes() for graph in opened.manifest.graphs]
    shared = shared_weights(files) if way == "--share-weights" else ()
    counted = ledger_before(opened, limits, largest, shared)
    short = ("--gpu", "l4", "--input-len", "8", "--output-len", "8")
    sizes = ("--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--json")
    for model in (bundle, tiny_checkpoint):
        kind = () if model == bundle else ("--target", "tensorrt")
        args = [str(model), *short, *sizes, *kind, *([way] if way else [])]
        result = CliRunner().invoke(cli, ["plan", *args])
        assert result.exit_code == 0, result.stderr
        memory = json.loads(result.stdout)["machines"][0]["memory"]
        assert memory["weight_bytes"] == counted.weights
        assert memory["slot_bytes"] * memory["slots"] == counted.kv.total


def test_an_exported_bundle_is_built_once_and_found(bundle: Path, rtx: TensorRT) -> None:
    first = run(bundle, "--gpu", "sm86,sm89", "--max-model-len", 64, "--json")
    assert first.exit_code == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["made"] is True
    plans = {p["phase"]: p for p in document["record"]["plans"]}
    layers = {phase: (p["attention_layers"], p["lengths_set"]) for phase, p in plans.items()}
    assert layers == {"prefill": (2, 0), "decode": (2, 2), "extend": (2, 2)}
    assert plans["extend"]["lower_right"] == 2
    for phase in document["memory"]["phases"]:
        assert phase["file_weights"] == weights_of(bundle / f"{phase['phase']}.onnx")
        assert phase["file_weights"] <= phase["weights"] < 1.1 * phase["file_weights"]
    # K and V of two heads of 16 numbers of two bytes in two layers, 128 tokens in 4 slots.
    assert document["memory"]["kv"]["total"] == 2 * 2 * 16 * 2 * 2 * 128 * 4
    found = find_engine(
        open_bundle(bundle), Machine("tensorrt_rtx", rtx.version, "sm89"), Need(4, 128)
    )
    assert str(bundle.resolve() / found.folder) == document["folder"]
    found.check_plans()

    second = run(bundle, "--gpu", "sm89,sm86", "--max-model-len", 64)
    assert second.exit_code == 0, second.stderr
    assert "nothing to do: " in second.stdout
    assert "--force builds again" in second.stdout
    assert "build the" not in second.stderr


def test_tables_say_what_was_built(bundle: Path, rtx: TensorRT) -> None:
    result = run(bundle, "--gpu", "sm86", "--max-model-len", 32, "--max-num-seqs", 2)
    assert result.exit_code == 0, result.stderr
    before, after = result.stdout.split("Plans\n")
    assert "KV cache, 2 slots of 64 tokens" in before
    assert "activation" not in before.replace("together, so far", "")
    assert "batch 1-2, seq 1-34, num_logits 1-32" in after
    assert "activation of decode" in after
    assert "together, activation shared" in after
    assert "built: " in after
    assert "build the extend plan" in result.stderr


def test_weights_can_be_held_once(bundle: Path, rtx: TensorRT) -> None:
    files = [weights_of(bundle / f"{phase}.onnx") for phase in ("prefill", "decode", "extend")]
    made = {}
    for way in ("--share-weights", "--single-engine"):
        result = run(bundle, "--gpu", "sm86", way, "--json")
        assert result.exit_code == 0, result.stderr
        document = json.loads(result.stdout)
        made[way] = document["memory"]
        assert max(files) * 0.9 < document["memory"]["weights"] < 1.2 * max(files)
    assert made["--share-weights"]["shared_weights"] > 0.9 * max(files)
    assert [phase["phase"] for phase in made["--single-engine"]["phases"]] == ["extend"]
    tables = run(bundle, "--gpu", "sm86", "--share-weights")
    assert tables.stdout.count("weights, shared") == 2
    both = run(bundle, "--gpu", "sm86", "--share-weights", "--single-engine")
    assert both.exit_code == 2
    assert "one plan has its weights once anyway; leave one of them out" in both.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpu", "h100"), "--gpu: got 'h100'; allowed: current, or compute capabilities"),
        (("--gpu", "sm86", "--max-model-len", "1m"), "the bundle was made for at most"),
        (("--max-num-seqs", "0"), "allowed: whole numbers from 1 on"),
    ],
)
def test_what_cannot_be_honoured_is_refused(bundle: Path, args: tuple[str, ...], said: str) -> None:
    result = run(bundle, *args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_a_gpu_one_has_to_be_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "current_gpu", lambda: None)
    result = run(bundle)
    assert result.exit_code == 2
    assert "--gpu current: no NVIDIA GPU is seen here; name what to build for" in result.stderr


def test_without_tensorrt_the_extra_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    result = run(bundle, "--gpu", "sm89")
    assert result.exit_code == 1
    assert "no TensorRT to build with" in result.stderr
    assert "pip install 'trtllm-lite[rtx]'" in result.stderr


def test_a_bundle_for_the_cpu_is_refused(bundle: Path, tmp_path: Path) -> None:
    other = shutil.copytree(bundle, tmp_path / "other", ignore=shutil.ignore_patterns("engines"))
    text = (bundle / "bundle.json").read_text()
    (other / "bundle.json").write_text(text.replace('"target": "tensorrt"', '"target": "cpu"'))
    result = run(other, "--gpu", "sm89")
    assert result.exit_code == 2
    assert "was exported for the target 'cpu', plans need 'tensorrt'" in result.stderr
