"""Opening a checkpoint: a Hugging Face folder, a hub id, or a GGUF file."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from trtllm_lite.exporter import gguf
from trtllm_lite.exporter.checkpoint_guard import (
    check_config,
    check_gguf,
    checkpoint_files,
    refuse_pickles,
)
from trtllm_lite.exporter.weights import SafetensorsSource, WeightSource
from trtllm_lite.runtime.errors import (
    CheckpointError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
)
from trtllm_lite.runtime.manifest import MANIFEST_NAME, Source
from trtllm_lite.runtime.progress import Progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Which frequencies it scales; transformers would read such a file as one without rope scaling.
ROPE_FACTORS = "rope_freqs.weight"
CONFIG_NAME = "config.json"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "README.md", "LICENSE*"]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `config` is a transformers configuration; `gguf_file` is set when the
    weights are one GGUF file inside `folder`."""

    folder: Path
    config: Any
    source: Source
    gguf_file: str | None = None

    @property
    def load_arguments(self) -> dict[str, Any]:
        """Arguments with which any transformers `from_pretrained` opens this checkpoint."""
        arguments: dict[str, Any] = {
            "pretrained_model_name_or_path": str(self.folder),
            "local_files_only": True,
            "trust_remote_code": False,
        }
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        return arguments

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files."""
        if self.gguf_file is not None:
            return (self.folder / self.gguf_file).stat().st_size
        return sum(f.stat().st_size for f in checkpoint_files(self.folder))

    def weights(self, model: Any) -> WeightSource:
        """Tensors of the checkpoint; `model` is asked for its parameter names only."""
        if self.gguf_file is not None:
            return gguf.GgufSource(self.folder / self.gguf_file, model)
        return SafetensorsSource(checkpoint_files(self.folder))

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder, None when there is none (always for GGUF)."""
        path = self.folder / name
        if self.gguf_file is not None or not path.is_file():
            return None
        return _read_json(path)


def open_checkpoint(model: str, revision: str | None, progress: Progress) -> Checkpoint:
    """Find and open a checkpoint. No weight is read, no code of the checkpoint is run.

    Raises CheckpointError when there is none or it is damaged, UnsupportedError for what its
    configuration asks and we refuse.
    """
    path = Path(model).expanduser()
    if revision is not None and path.exists():
        raise UsageError(f"--revision: {model} is on this machine; only a hub id has revisions")
    if path.is_file():
        return _open_gguf(path)
    if path.is_dir():
        return _open_folder(path, model_id=path.resolve().name, revision=None)
    if HUB_ID.fullmatch(model) and not model.startswith("."):
        folder = _download(model, revision, progress, HUB_FILES)
        # The hub's cache names a snapshot by its commit.
        return _open_folder(folder, model, folder.name)
    raise CheckpointError(
        f"{model}: no such file or folder, and not a hub id (owner/name); "
        "give a Hugging Face folder, a hub id or a GGUF file"
    )


def open_config(model: str, revision: str | None, progress: Progress) -> Any:
    """The transformers configuration of what `open_checkpoint` opens, with the same refusals; the
    weights of a folder may be missing, those of a hub id are not downloaded."""
    path = Path(model).expanduser()
    if revision is not None and path.exists():
        raise UsageError(f"--revision: {model} is on this machine; only a hub id has revisions")
    if path.is_dir():
        return _read_config(path)
    if not path.exists() and HUB_ID.fullmatch(model) and not model.startswith("."):
        return _read_config(_download(model, revision, progress, [CONFIG_NAME]))
    return open_checkpoint(model, revision, progress).config


def _open_folder(folder: Path, model_id: str, revision: str | None) -> Checkpoint:
    config = _read_config(folder)
    if not checkpoint_files(folder):
        refuse_pickles(folder)
        raise CheckpointError(f"{folder}: no .safetensors weights")
    source = Source(model_id, "safetensors", revision, _license(folder))
    return Checkpoint(folder, config, source)


def _read_config(folder: Path) -> Any:
    config_path = folder / CONFIG_NAME
    if not config_path.is_file():
        found = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))[:3])
        hint = f"; it holds {found}: give that file" if found else ""
        if (folder / MANIFEST_NAME).is_file():
            hint = "; it is a bundle already: give what it was made from"
        raise CheckpointError(f"{folder}: no config.json, so not a checkpoint folder{hint}")
    raw = _read_json(config_path)
    # transformers has its own code for these, and does not look at a map to foreign code.
    check_config(raw, native_model_types=CONFIG_MAPPING.keys())
    return _config(str(folder))


def _open_gguf(path: Path) -> Checkpoint:
    if path.suffix != ".gguf":
        raise CheckpointError(
            f"{path.name}: not a GGUF file; give a Hugging Face folder, a hub id or a .gguf file"
        )
    if any(tensor.name == ROPE_FACTORS for tensor in check_gguf(path).tensors):
        raise UnsupportedError(
            f"rope scaling given as a tensor ({ROPE_FACTORS}, as in GGUF files of Llama 3.1)",
            "GGUF files whose rope is in their metadata",
            "export from the safetensors checkpoint",
        )
    license_name = gguf.metadata_text(path, "general.license")
    source = Source(path.name, "gguf", None, license_name)
    config = _config(str(path.parent), gguf_file=path.name)
    return Checkpoint(path.parent, config, source, path.name)


def _config(folder: str, **arguments: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **arguments
        )
    except (ValueError, KeyError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"the configuration cannot be read: {first}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds {type(value).__name__}, not an object")
    return value


def _license(folder: Path) -> str | None:
    """The `license:` line of the model card's front matter."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    head = card.read_text(encoding="utf-8", errors="replace")[:4096]
    found = re.search(r"^license:\s*(\S+)\s*$", head, re.MULTILINE)
    return found.group(1) if found else None


def _download(model: str, revision: str | None, progress: Progress, patterns: list[str]) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtraError("huggingface-hub", "export") from error
    progress.step(f"download {model}")
    try:
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=patterns
        )
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{model} could not be downloaded from the hub ({type(error).__name__}: {first}); "
            "check the id and the network, or give a local folder"
        ) from error
    return Path(folder)
