"""The random checkpoints that exports are measured with are real checkpoints."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from trtllm_lite.exporter.safetensors_guard import check_safetensors
from trtllm_lite.tools.make_checkpoint import SHAPES, STD, main, make_checkpoint

TINY = SHAPES["tiny"]


def test_transformers_loads_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, TINY, sparse=False, seed=0)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), "no tensor is missing, left over or of another shape"
    assert model.config.hidden_size == TINY.hidden
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_the_header_is_right(tmp_path: Path) -> None:
    total = make_checkpoint(tmp_path, TINY, sparse=False, seed=0)
    path = tmp_path / "model.safetensors"
    header = check_safetensors(path)
    assert [(t.name, t.shape) for t in header.tensors] == list(TINY.tensors())
    assert {t.dtype for t in header.tensors} == {"BF16"}
    assert header.data_start % 8 == 0
    assert path.stat().st_size == header.data_start + total
    assert total == 2 * sum(int(np.prod(shape)) for _, shape in TINY.tensors())


def test_values(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, TINY, sparse=False, seed=0)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.norm.weight"), torch.ones(64).bfloat16())
        noise = file.get_tensor("model.embed_tokens.weight").float()
    assert abs(float(noise.std()) - STD) < STD / 20
    assert abs(float(noise.mean())) < STD / 20


def test_the_seed_decides(tmp_path: Path) -> None:
    made = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tmp_path / name, TINY, sparse=False, seed=seed)
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_sparse_files_are_whole_and_take_no_room(tmp_path: Path, name: str) -> None:
    total = make_checkpoint(tmp_path, SHAPES[name], sparse=True, seed=0)
    path = tmp_path / "model.safetensors"
    header = check_safetensors(path)
    assert [(t.name, t.shape) for t in header.tensors] == list(SHAPES[name].tensors())
    assert path.stat().st_size == header.data_start + total
    assert path.stat().st_blocks * 512 < 2**20
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        assert len(json.loads(file.read(length))) == len(header.tensors)


@pytest.mark.parametrize(("name", "billions"), [("135m", 0.135), ("1b", 1.24), ("8b", 8.03)])
def test_sizes_are_what_the_names_say(name: str, billions: float) -> None:
    count = sum(int(np.prod(shape)) for _, shape in SHAPES[name].tensors())
    assert count / 1e9 == pytest.approx(billions, abs=0.01)


def test_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path / "new" / "m"), "--shape", "tiny"])
    assert result.exit_code == 0
    assert "0.00 GB of weights" in result.output
    assert {p.name for p in (tmp_path / "new" / "m").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
