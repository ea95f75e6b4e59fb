"""A checkpoint that does not fit its model is refused by name, before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.runtime.errors import CheckpointError, UnsupportedError
from trtllm_lite.runtime.progress import NoProgress

NORM = "model.layers.1.input_layernorm.weight"
Copied = Callable[[Path], Path]


def run(checkpoint: Path, output: Path, **more: Any) -> None:
    options = ExportOptions(model=str(checkpoint), output=output, verify=False, **more)
    export(options, NoProgress())


def edited(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = {n: t.clone() for n, t in load_file(checkpoint / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    return checkpoint


def nothing_is_written(checkpoint: Path, tmp_path: Path, **more: Any) -> str:
    """The message of the refusal, which must come before anything is written."""
    output = tmp_path / "place" / "out"
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        run(checkpoint, output, **more)
    assert not output.parent.exists()
    return str(caught.value)


def test_a_missing_tensor(
    tiny_checkpoint: Path, tmp_path: Path, copied: Copied, traced: None
) -> None:
    checkpoint = edited(copied(tiny_checkpoint), lambda t: t.__delitem__(NORM))
    assert nothing_is_written(checkpoint, tmp_path) == f"the checkpoint has no tensor for {NORM}"


def test_an_unknown_tensor(
    tiny_checkpoint: Path, tmp_path: Path, copied: Copied, traced: None
) -> None:
    extra = "model.layers.1.self_attn.q_norm.weight"
    checkpoint = edited(copied(tiny_checkpoint), lambda t: t.update({extra: torch.ones(4)}))
    said = nothing_is_written(checkpoint, tmp_path)
    assert said == f"the model has no place for the checkpoint's {extra}"


def test_a_tensor_of_another_shape(
    tiny_checkpoint: Path, tmp_path: Path, copied: Copied, traced: None
) -> None:
    checkpoint = edited(copied(tiny_checkpoint), lambda t: t.update({NORM: torch.ones(65)}))
    said = nothing_is_written(checkpoint, tmp_path)
    assert said == f"{NORM}: the checkpoint's shape is [65], the model's [64]"


def test_a_tensor_of_a_type_that_is_not_read(
    tiny_checkpoint: Path, tmp_path: Path, copied: Copied, traced: None
) -> None:
    checkpoint = edited(
        copied(tiny_checkpoint), lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})
    )
    said = nothing_is_written(checkpoint, tmp_path)
    assert f"weights of type I8 (tensor {NORM})" in said
    assert "F32, F16, BF16" in said


def test_values_over_float16_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, copied: Copied, traced: None
) -> None:
    checkpoint = edited(copied(tiny_checkpoint), lambda t: t[NORM].__setitem__(3, 7e4))
    with pytest.raises(UnsupportedError) as caught:
        run(checkpoint, tmp_path / "place" / "out", dtype="float16")
    assert f"values over 65504 in {NORM}" in str(caught.value)
    assert "export with --dtype bfloat16" in str(caught.value)
    assert list((tmp_path / "place").iterdir()) == []
    run(checkpoint, tmp_path / "place" / "out", dtype="bfloat16")
