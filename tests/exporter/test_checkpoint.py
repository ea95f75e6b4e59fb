"""Opening a checkpoint: what it is, or one line that says why it cannot be opened."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from trtllm_lite.exporter import checkpoint as module
from trtllm_lite.exporter.checkpoint import Checkpoint, open_checkpoint
from trtllm_lite.runtime.errors import (
    CheckpointError,
    MissingExtraError,
    TrtllmLiteError,
    UsageError,
)
from trtllm_lite.runtime.progress import NoProgress

EMPTY = b"\x02\0\0\0\0\0\0\0{}"


def opened(model: Path | str, revision: str | None = None) -> Checkpoint:
    return open_checkpoint(str(model), revision, NoProgress())


def refusal(model: Path | str, revision: str | None = None) -> str:
    with pytest.raises(TrtllmLiteError) as caught:
        opened(model, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def folder(path: Path, config: Any = None, weights: bytes | None = EMPTY) -> Path:
    """A checkpoint folder; `config` is JSON data or the text itself."""
    path.mkdir()
    raw = {"model_type": "llama", "hidden_size": 64} if config is None else config
    (path / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    if weights is not None:
        (path / "model.safetensors").write_bytes(weights)
    return path


def test_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "my-model")
    made = opened(path)
    assert (made.folder, made.gguf_file) == (path, None)
    assert made.config.model_type == "llama"
    assert made.config.hidden_size == 64
    assert (made.source.id, made.source.format) == ("my-model", "safetensors")
    assert (made.source.revision, made.source.license) == (None, None)
    assert made.weight_bytes == len(EMPTY)
    assert made.json("config.json") == {"model_type": "llama", "hidden_size": 64}
    assert made.json("generation_config.json") is None
    arguments = made.load_arguments
    assert (arguments["local_files_only"], arguments["trust_remote_code"]) == (True, False)


def test_the_id_is_a_name_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "my-model")
    monkeypatch.chdir(path)
    assert opened(".").source.id == "my-model"
    monkeypatch.chdir(tmp_path)
    assert opened("my-model/").source.id == "my-model"


def test_a_shard_index_counts_its_shards(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", weights=None)
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in weight_map.values():
        (path / name).write_bytes(EMPTY)
    assert opened(path).weight_bytes == 2 * len(EMPTY)


@pytest.mark.parametrize(
    ("card", "license_name"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# Model", "apache-2.0"),
        ("---\nlanguage: en\nlicense:   mit  \n---", "mit"),
        ("# Model\nno front matter", None),
        ("license: many words\n", None),
        ("x" * 5000 + "\nlicense: mit\n", None),
    ],
)
def test_license(tmp_path: Path, card: str, license_name: str | None) -> None:
    path = folder(tmp_path / "m")
    (path / "README.md").write_text(card)
    assert opened(path).source.license == license_name


# What cannot be opened


def test_neither_a_path_nor_a_hub_id(tmp_path: Path) -> None:
    for name in ("no-such-folder", str(tmp_path / "missing"), "./owner/name", "a/b/c", "a b/c", ""):
        said = refusal(name) if name else refusal(tmp_path / "x")
        assert "no such file or folder, and not a hub id" in said
        assert "give a Hugging Face folder, a hub id or a GGUF file" in said


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert "no config.json, so not a checkpoint folder" in refusal(tmp_path)


def test_a_folder_of_gguf_files(tmp_path: Path) -> None:
    for name in ("b.Q8_0.gguf", "a.Q4_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "it holds a.Q4_0.gguf, b.Q8_0.gguf: give that file" in refusal(tmp_path)


def test_a_bundle_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text("{}")
    assert "bundle already" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "config.json is not valid JSON"),
        ("", "config.json is not valid JSON"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ("[1, 2]", "config.json holds list, not an object"),
        ('"llama"', "config.json holds str, not an object"),
        ('{"model_type": "unheard_of"}', "the configuration cannot be read"),
        ("{}", "the configuration cannot be read"),
    ],
)
def test_bad_configurations(tmp_path: Path, text: str, why: str) -> None:
    assert why in refusal(folder(tmp_path / "m", text))


def test_a_config_that_is_not_utf8(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_bytes(b'{"a": "\xff"}')
    assert "config.json is not valid JSON" in refusal(path)


def test_no_weights(tmp_path: Path) -> None:
    assert "no .safetensors weights" in refusal(folder(tmp_path / "m", weights=None))


def test_pickles_only(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", weights=None)
    (path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    said = refusal(path)
    assert "its weights are pickled (pytorch_model.bin)" in said
    assert "safetensors" in said


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(EMPTY)
    assert "model.safetensors: not a GGUF file" in refusal(tmp_path / "model.safetensors")
    (tmp_path / "model.gguf").write_bytes(bytes(64))
    assert "model.gguf: not a GGUF file" in refusal(tmp_path / "model.gguf")


# The hub


def test_a_download_records_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    patterns: list[str] = []

    def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision))
        patterns.extend(allow_patterns)
        return str(tmp_path / "c0ffee")

    folder(tmp_path / "c0ffee")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    made = opened("owner/name.v1", "main")
    assert asked == [("owner/name.v1", "main")]
    assert (made.source.id, made.source.revision) == ("owner/name.v1", "c0ffee")
    for name in ("pytorch_model.bin", "model.pt", "modeling_x.py", "original/params.pth"):
        assert not [pattern for pattern in patterns if fnmatch(name, pattern)]


@pytest.mark.parametrize(
    "error",
    [ConnectionError("no route to host\nsecond line"), OSError(""), ValueError("bad id")],
    ids=lambda e: type(e).__name__,
)
def test_offline_is_one_clear_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_args: Any, **_kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    said = refusal("owner/name")
    assert said.startswith(
        f"owner/name could not be downloaded from the hub ({type(error).__name__}"
    )
    assert "second line" not in said
    assert said.endswith("check the id and the network, or give a local folder")


def test_an_interrupt_of_a_download_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_args: Any, **_kwargs: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(KeyboardInterrupt):
        opened("owner/name")


def test_without_the_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="huggingface-hub is not installed"):
        opened("owner/name")


def test_a_revision_of_what_is_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--revision: .* only a hub id has revisions"):
        opened(folder(tmp_path / "m"), "main")


def test_a_local_folder_goes_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner").mkdir()
    folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_download", None)
    assert opened("owner/name").source.id == "name"


def test_errors_are_of_the_right_kind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        opened(tmp_path)
