"""Checkpoints that would run code, reach out or point elsewhere are refused by name."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.exporter.checkpoint_guard import (
    check_config,
    checkpoint_files,
    refuse_pickles,
)
from trtllm_lite.runtime.errors import CheckpointError, UnsupportedError
from trtllm_lite.runtime.progress import NoProgress

HEADER = b"\x02\0\0\0\0\0\0\0{}"


def index(folder: Path, weight_map: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint_files(folder)
    assert str(caught.value).isprintable()
    return str(caught.value)


# Which files hold the weights


def test_a_single_file_wins(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADER)
    index(tmp_path, {"a": "model-1.safetensors"})
    assert checkpoint_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_shards_of_the_index(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(HEADER)
    index(
        tmp_path,
        {"b": "model-2.safetensors", "a": "model-1.safetensors", "c": "model-2.safetensors"},
    )
    expected = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    assert checkpoint_files(tmp_path) == expected


def test_no_safetensors_is_no_error_yet(tmp_path: Path) -> None:
    assert checkpoint_files(tmp_path) == []


def test_weights_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(HEADER)
    text = refusal(tmp_path)
    assert "adapter_model.safetensors" in text
    assert "is it an adapter?" in text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../model.safetensors", "'..'"),
        ("/etc/model.safetensors", "absolute"),
        ("sub/model.safetensors", "bare file name"),
        ("a\\b.safetensors", "backslash"),
        ("", "is empty"),
        ("a\0.safetensors", "portable"),
        ("a\n.safetensors", "portable"),
        ("model.bin", "not a safetensors file"),
        ("missing.safetensors", "cannot be opened"),
        (7, "must name at most"),
        (None, "must name at most"),
    ],
)
def test_shard_names(tmp_path: Path, name: object, why: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors").write_bytes(HEADER)
    index(tmp_path, {"a": name})
    assert why in refusal(tmp_path)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not JSON"),
        (b"[]", "weight_map"),
        (b'{"weight_map": {}}', "weight_map"),
        (b'{"weight_map": []}', "weight_map"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "duplicate key 'a'"),
        (b"version https://git-lfs.invalid/spec/v1\n", "git lfs pull"),
    ],
)
def test_broken_indexes(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    assert why in refusal(tmp_path)


def test_a_huge_index_is_not_read(tmp_path: Path) -> None:
    os.truncate(index(tmp_path, {}), 2**30)
    assert "at most 33554432 are read" in refusal(tmp_path)


def test_odd_shards(tmp_path: Path) -> None:
    index(tmp_path, {"a": "model-1.safetensors"})
    os.mkfifo(tmp_path / "model-1.safetensors")
    assert "not a regular file" in refusal(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    (tmp_path / "model-1.safetensors").write_text("version https://git-lfs.invalid/spec/v1\n")
    assert "git lfs pull" in refusal(tmp_path)


# Pickles


class Canary:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.PTH", "model.ckpt"])
def test_pickled_weights_are_never_loaded(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    pickle.loads((folder / name).read_bytes())
    assert canary.exists(), "the canary works"
    canary.unlink()
    assert checkpoint_files(folder) == []
    with pytest.raises(CheckpointError) as caught:
        refuse_pickles(folder)
    assert name in str(caught.value)
    assert "safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not canary.exists()


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "model.safetensors").write_bytes(HEADER)
    refuse_pickles(tmp_path)
    assert checkpoint_files(tmp_path) == [tmp_path / "model.safetensors"]


# Configurations

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "rope_scaling": {"factor": 2.0}}


def test_plain_configurations_pass() -> None:
    check_config(LLAMA)
    check_config({})
    check_config(LLAMA | {"auto_map": {}, "_attn_implementation_internal": None})
    check_config(LLAMA | {"attn_implementation": "sdpa", "_attn_implementation": None})
    check_config(LLAMA | {"attn_implementation": {"text_config": "eager"}})


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "auto_map"),
        ({"text_config": {"auto_map": {"AutoModel": "evil.Model"}}}, "text_config.auto_map"),
        ({"parts": [{"auto_map": {"AutoModel": "evil.Model"}}]}, "parts.auto_map"),
        ({"_attn_implementation_internal": "owner/kernel"}, "_attn_implementation_internal"),
        ({"_experts_implementation_internal": "x"}, "_experts_implementation_internal"),
        ({"_attn_implementation": "owner/kernel"}, "_attn_implementation 'owner/kernel'"),
        ({"attn_implementation": "owner/kernel:f"}, "attn_implementation 'owner/kernel:f'"),
        ({"attn_implementation": {"": "owner/kernel"}}, "attn_implementation 'owner/kernel'"),
        ({"attn_implementation": ["sdpa"]}, "attn_implementation"),
        ({"experts_implementation": "owner/kernel"}, "experts_implementation 'owner/kernel'"),
        (
            {"text_config": {"_attn_implementation_internal": "x"}},
            "text_config._attn_implementation_internal",
        ),
    ],
)
def test_foreign_code_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_config(LLAMA | extra)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_code_map_of_a_model_that_transformers_has_itself() -> None:
    config = LLAMA | {"auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"}}
    check_config(config, native_model_types=["llama"])
    with pytest.raises(UnsupportedError, match="auto_map"):
        check_config(config, native_model_types=["mistral"])
    config |= {"_attn_implementation_internal": "owner/kernel"}
    with pytest.raises(UnsupportedError, match="_attn_implementation_internal"):
        check_config(config, native_model_types=["llama"])


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"}}, "auto_map"),
        ({"_attn_implementation_internal": "owner/kernel"}, "_attn_implementation_internal"),
    ],
)
def test_opening_runs_no_code_and_uses_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], named: str
) -> None:
    from trtllm_lite.exporter.checkpoint import open_checkpoint

    canary = tmp_path / "canary"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    (folder / "model.safetensors").write_bytes(HEADER)
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of"} | extra))
    tried: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, to: tried.append(to))
    with pytest.raises(UnsupportedError, match=named):
        open_checkpoint(str(folder), None, NoProgress())
    assert not canary.exists()
    assert tried == []


def test_opening_never_loads_a_pickle(tmp_path: Path) -> None:
    from trtllm_lite.exporter.checkpoint import open_checkpoint

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(CheckpointError, match="use the safetensors version"):
        open_checkpoint(str(folder), None, NoProgress())
    assert not (tmp_path / "canary").exists()


def test_nesting_is_bounded() -> None:
    config: dict[str, object] = {}
    for _ in range(100):
        config = {"inner": config}
    with pytest.raises(CheckpointError, match="nested deeper than 32"):
        check_config(config)


def test_the_guard_imports_nothing_that_could_run_a_model() -> None:
    code = (
        "import sys, trtllm_lite.exporter.checkpoint_guard\n"
        "heavy = {'torch', 'transformers', 'onnx', 'gguf', 'safetensors', 'huggingface_hub'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
