"""The real model as TensorRT plans: SmolLM2-135M-Instruct exported for TensorRT, and built without
a GPU by TensorRT-RTX."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.runtime.engines.trt_module import installed_tensorrt
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.tools.cli import cli
from trtllm_lite.tools.demo import find_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not any(trt.flavour == "tensorrt_rtx" for trt in installed_tensorrt()),
        reason="TensorRT-RTX is not installed: pip install 'trtllm-lite[rtx]'",
    ),
]

LAYERS = 30
SLOTS, LENGTH, CHUNK = 8, 512, 256
GPUS = "sm86,sm89,sm120"


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `build --json` says. The certificate of this target is proved on tiny models: here its
    time goes into the plans."""
    bundle = tmp_path_factory.mktemp("tensorrt") / "smollm2"
    options = ExportOptions(
        model=str(find_model()), output=bundle, target="tensorrt", dtype="float16", verify=False
    )
    export(options, NoProgress())
    sizes = {"--max-num-seqs": SLOTS, "--max-model-len": LENGTH, "--max-num-batched-tokens": CHUNK}
    flags = [str(x) for pair in sizes.items() for x in pair]
    result = CliRunner().invoke(cli, ["build", str(bundle), "--gpu", GPUS, *flags, "--json"])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found | {"bundle": str(bundle)}


def test_every_attention_is_patched(document: dict[str, Any]) -> None:
    """Decode and extend learn their lengths; prefill has none to learn."""
    plans = {p["phase"]: p for p in document["record"]["plans"]}
    layers = {name: (p["attention_layers"], p["lengths_set"]) for name, p in plans.items()}
    assert layers == {
        "prefill": (LAYERS, 0),
        "decode": (LAYERS, LAYERS),
        "extend": (LAYERS, LAYERS),
    }
    assert plans["extend"]["lower_right"] == LAYERS


def test_plans_hold_their_weights_and_no_more(document: dict[str, Any]) -> None:
    for phase in document["memory"]["phases"]:
        assert phase["file_weights"] <= phase["weights"] < 1.02 * phase["file_weights"]
        plan = Path(document["folder"]) / f"{phase['phase']}.plan"
        assert phase["weights"] < plan.stat().st_size < 1.2 * phase["weights"]


def test_the_cache_is_counted_to_the_byte(document: dict[str, Any]) -> None:
    """K and V of 3 heads of 64 numbers of two bytes in 30 layers, with room for a padded chunk
    behind the last token."""
    token = 2 * 3 * 64 * 2 * LAYERS
    assert document["memory"]["kv"]["total"] == token * (LENGTH + CHUNK) * SLOTS
