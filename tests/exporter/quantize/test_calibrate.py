"""What calibration decides for each format, and that the bundle is made of it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_lite.exporter.calibration.quantizer import CalibratedQuantizer
from trtllm_lite.exporter.checkpoint import open_checkpoint
from trtllm_lite.exporter.graphs import Graphs
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.exporter.quantize import calibrate as module
from trtllm_lite.exporter.quantize.calibrate import Calibrated, Text, calibrate
from trtllm_lite.exporter.quantize.plan import Linear
from trtllm_lite.exporter.quantize.quantizer import RoundToNearest
from trtllm_lite.exporter.quantize.rewrite import find_linears
from trtllm_lite.runtime.progress import NoProgress

Copied = Callable[[Path], Path]
NORM = "model.layers.0.input_layernorm.weight"
LOUD = 5


@pytest.mark.parametrize(
    ("quantize", "prefill_format", "bits", "blocks"),
    [
        ("int8", None, [8, 8], [32, None]),
        ("int8", "w8a8", [8, 8], [32, None]),
        ("int8", "same", [8], [32]),
        ("int4", None, [4], [32]),
        ("int4", "w8a8", [4, 8], [32, None]),
    ],
)
def test_changes_are_weighed_by_the_roundings_of_both_phases(
    loud_checkpoint: Path,
    weights: tuple[Linear, ...],
    monkeypatch: pytest.MonkeyPatch,
    quantize: str,
    prefill_format: str | None,
    bits: list[int],
    blocks: list[int | None],
) -> None:
    seen: list[Any] = []

    def watched(_model: Any, _windows: Any, _progress: Any, roundings: Any) -> Any:
        seen.extend(roundings)
        raise InterruptedError

    monkeypatch.setattr(module, "equalize", watched)
    with pytest.raises(InterruptedError):
        run(loud_checkpoint, weights, quantize, prefill_format)
    assert [r.bits for r in seen] == bits
    assert [r.block for r in seen] == blocks


@pytest.fixture
def loud_checkpoint(tiny_checkpoint: Path, copied: Copied) -> Path:
    """`tiny_checkpoint` with one feature of every norm 64 times as large."""
    folder = copied(tiny_checkpoint)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor[LOUD] = 64.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def weights(fresh_graphs: Callable[[], Graphs]) -> tuple[Linear, ...]:
    return find_linears(fresh_graphs().models)


def run(
    folder: Path, weights: Iterable[Linear], quantize: str, prefill_format: str | None = None
) -> Calibrated:
    options = ExportOptions(
        model=str(folder),
        output=folder / "out",
        quantize=quantize,
        prefill_format=prefill_format,
    )
    checkpoint = open_checkpoint(str(folder), None, NoProgress())
    text = Text(None, checkpoint.config.vocab_size, 64)
    return calibrate(options, checkpoint, weights, (), text, NoProgress())


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_loud_features_are_evened_out(
    loud_checkpoint: Path, weights: tuple[Linear, ...], quantize: str
) -> None:
    made = run(loud_checkpoint, weights, quantize)
    norm = made.scalings[NORM].rows
    assert norm is not None
    assert norm[LOUD] < np.delete(norm, LOUD).min()
    reader = made.scalings["model.layers.0.self_attn.k_proj.weight"].columns
    assert reader is not None
    assert np.array_equal(reader * norm, np.ones_like(norm))
    assert isinstance(made.quantizer, CalibratedQuantizer if quantize == "int4" else RoundToNearest)


def test_int8_spares_weights_where_activations_are_rounded_by_the_token(
    loud_checkpoint: Path, weights: tuple[Linear, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROW_COST_LIMIT", 0.0)
    inner = {w.name for w in weights if not w.is_head and w.is_linear}
    assert run(loud_checkpoint, weights, "int8", "same").keep_int8 == ()
    assert set(run(loud_checkpoint, weights, "int8").keep_int8) == inner


def test_int4_keeps_what_its_room_allows(
    loud_checkpoint: Path, weights: tuple[Linear, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = {w.name for w in weights if not w.is_head and w.is_linear}
    monkeypatch.setattr(module, "SPARED_SHARE", 0.0)
    assert run(loud_checkpoint, weights, "int4").keep_int8 == ()
    monkeypatch.setattr(module, "SPARED_SHARE", 1.0)
    assert set(run(loud_checkpoint, weights, "int4").keep_int8) == inner


def test_without_room_for_the_reference_grids_are_searched(
    loud_checkpoint: Path, weights: tuple[Linear, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_free_bytes", lambda: 2**20)
    made = run(loud_checkpoint, weights, "int4")
    assert (made.keep_int8, dict(made.scalings)) == ((), {})
    assert isinstance(made.quantizer, CalibratedQuantizer)


def stored(bundle: Path, name: str) -> Any:
    """A float32 tensor of the bundle's decode graph."""
    model = onnx.load(bundle / "decode.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    entry = {e.key: e.value for e in tensor.external_data}
    start, length = int(entry["offset"]), int(entry["length"])
    return np.frombuffer((bundle / "weights.bin").read_bytes()[start : start + length], np.float32)


def test_the_bundle_holds_the_scaled_tensors(
    loud_checkpoint: Path, tmp_path: Path, traced: None
) -> None:
    options = ExportOptions(
        model=str(loud_checkpoint), output=tmp_path / "out", quantize="int8", verify=False
    )
    export(options, NoProgress())
    kept = load_file(loud_checkpoint / "model.safetensors")[NORM].numpy()
    ratio = stored(tmp_path / "out", NORM) / kept
    assert ratio[LOUD] < 1
    assert (np.frexp(ratio)[0] == 0.5).all()


def test_plain_weights_are_not_touched(loud_checkpoint: Path, tmp_path: Path, traced: None) -> None:
    options = ExportOptions(model=str(loud_checkpoint), output=tmp_path / "out", verify=False)
    export(options, NoProgress())
    kept = load_file(loud_checkpoint / "model.safetensors")[NORM]
    assert torch.equal(torch.from_numpy(stored(tmp_path / "out", NORM).copy()), kept)
