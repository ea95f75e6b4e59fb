"""Weights that the checkpoint keeps in another order than graphs do: they are quantized too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from trtllm_lite.exporter.calibration.equalize import equalize
from trtllm_lite.exporter.calibration.scaling import Scaling
from trtllm_lite.exporter.families import PROVED, tiny_config
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.exporter.quantize.calibrate import NOT_CALIBRATED
from trtllm_lite.exporter.quantize.turned import turn_conv1d, turned_back
from trtllm_lite.runtime.progress import NoProgress

PACKED = {
    "gpt2": "transformer.h.0.attn.c_attn.weight",
    "gpt_neox": "gpt_neox.layers.0.attention.query_key_value.weight",
}
KINDS = {"q8": np.uint8, "q8_scale": np.float32}


def config(model_type: str) -> Any:
    return tiny_config(next(f for f in PROVED if f.model_type == model_type))


def gpt2() -> Any:
    """Of which every norm has one feature that is 64 times as large."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config("gpt2"), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
            if ".ln_" in name and name.endswith("weight"):
                parameter[5] = 64.0
    return model


def text() -> Any:
    return np.random.default_rng(1).integers(0, 160, (4, 24))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(input_ids=torch.from_numpy(text())).logits
    return made


def test_turned_layers_compute_the_same() -> None:
    model = gpt2()
    before = logits(model)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    turned = turn_conv1d(model)
    assert turned == {name for name in kept if ".c_" in name and name.endswith("weight")}
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, kept[name].t() if name in turned else kept[name])
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-4)
    assert turn_conv1d(model) == frozenset()


def test_scalings_are_of_the_weights_as_they_are_stored() -> None:
    model, original = gpt2(), gpt2()
    turned = turn_conv1d(model)
    scalings = turned_back(equalize(model, text(), NoProgress()), turned)
    assert {name for name in turned if "c_attn" in name or "c_fc" in name} <= scalings.keys()
    before = logits(original)
    changed = dict(original.named_parameters())
    for name, scaling in scalings.items():
        flat = changed[name].detach().numpy().reshape(-1)
        shape = tuple(changed[name].shape)
        numbers = np.concatenate(list(scaling.applied([flat], shape))).reshape(shape)
        changed[name].data.copy_(torch.from_numpy(numbers))
    torch.testing.assert_close(logits(original), before, rtol=1e-5, atol=1e-3)
    norm = scalings["transformer.h.0.ln_1.weight"].rows
    assert norm is not None
    assert norm[5] < np.delete(norm, 5).min()


def test_other_scalings_stay() -> None:
    one = Scaling(rows=np.ones(2, np.float32), shift=1.0)
    back = turned_back({"a": one, "b": one}, ["b"])
    assert back["a"] is one
    assert (back["b"].rows, back["b"].columns, back["b"].shift) == (None, one.rows, 1.0)


def stored(bundle: Path, name: str) -> Any:
    """The weights that the decode graph's integers stand for, flat."""
    model = onnx.load(bundle / "decode.onnx", load_external_data=False)
    data, found = (bundle / "weights.bin").read_bytes(), {}
    for tensor in model.graph.initializer:
        for part, kind in KINDS.items():
            if tensor.name == f"{name}.{part}":
                entry = {e.key: int(e.value) for e in tensor.external_data if e.key != "location"}
                raw = data[entry["offset"] :][: entry["length"]]
                found[part] = np.frombuffer(raw, kind).reshape(tensor.dims)
    step = found["q8_scale"][..., None]
    return (found["q8"].astype(np.float32) - 128) * step, np.broadcast_to(step, found["q8"].shape)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox"])
def test_integers_are_those_of_the_weight_in_the_graphs_order(
    model_type: str,
    tmp_path: Path,
    random_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trtllm_lite.exporter.pipeline.calibrate", lambda *_args: NOT_CALIBRATED)
    made = config(model_type)
    checkpoint = random_checkpoint(made, tmp_path / "checkpoint")
    output = tmp_path / "bundle"
    options = ExportOptions(model=str(checkpoint), output=output, quantize="int8", verify=False)
    report = export(options, NoProgress())
    layers, heads = made.num_hidden_layers, made.num_attention_heads
    assert report.counts["decode.int8_block32"] == 4 * layers + 1
    assert report.counts["native.linear"] == 4 * layers + 1
    tensors = load_file(checkpoint / "model.safetensors")
    name = PACKED[model_type]
    weight = tensors[name].numpy()
    if model_type == "gpt2":
        wanted = weight.T
    else:
        wanted = np.concatenate(
            [head[part] for part in range(3) for head in weight.reshape(heads, 3, -1, 128)]
        )
    got, step = stored(output, name)
    assert np.all(np.abs(got - wanted.reshape(got.shape)) <= 0.501 * step)
    assert not np.all(np.abs(got - weight.reshape(got.shape)) <= 0.501 * step)
