"""Safety checks of a checkpoint before anything else opens it.

A checkpoint comes from a stranger. Its formats are data only, except where they are not: pickled
weights run code when they are loaded, and a configuration can ask transformers to import code of
the checkpoint or to fetch kernels from the hub. These are refused by name; the data formats have
their headers checked (`safetensors_guard.py`, `gguf_guard.py`). Nothing here imports torch or
transformers, reads weights, or uses the network.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from trtllm_lite.exporter.gguf_guard import GGUFEntry, GGUFHeader, check_gguf
from trtllm_lite.exporter.guarded_file import guarded
from trtllm_lite.exporter.safetensors_guard import (
    SafetensorsEntry,
    SafetensorsHeader,
    check_safetensors,
)
from trtllm_lite.runtime import strict_json
from trtllm_lite.runtime.bundle_files import bare_name_problem
from trtllm_lite.runtime.errors import CheckpointError, UnsupportedError
from trtllm_lite.runtime.strict_json import shown

__all__ = [
    "GGUFEntry",
    "GGUFHeader",
    "SafetensorsEntry",
    "SafetensorsHeader",
    "check_config",
    "check_gguf",
    "check_safetensors",
    "checkpoint_files",
    "refuse_pickles",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 32 * 2**20
MAX_SHARDS = 10_000
MAX_CONFIG_DEPTH = 32
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_INTERNAL = ("_attn_implementation_internal", "_experts_implementation_internal")
_IMPLEMENTATION = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
# Names inside transformers, all of them replaced by the exporter's own attention; any other value
# can name a kernel to be fetched from the hub.
_LOCAL_IMPLEMENTATIONS = (
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "batched_mm",
    "grouped_mm",
)


def check_config(config: Mapping[str, object], native_model_types: Collection[str] = ()) -> None:
    """Refuse a configuration that asks for foreign code, at any depth.

    `auto_map` names Python files of the checkpoint. It is let pass only where the top-level
    `model_type` is one of `native_model_types`: transformers has its own code for those and,
    called without trust in remote code, never looks at the map. Raises UnsupportedError.
    """
    native = config.get("model_type") in native_model_types
    _check_config(config, "", native, 0)


def _check_config(config: Mapping[str, object], at: str, native: bool, depth: int) -> None:
    if depth > MAX_CONFIG_DEPTH:
        raise CheckpointError(f"config.json: nested deeper than {MAX_CONFIG_DEPTH}")
    for key, value in config.items():
        title = f"{at}{key}"
        if key == "auto_map" and value and not native:
            raise _foreign(title, "the models of transformers itself")
        if key in _INTERNAL and value is not None:
            raise _foreign(title, "configurations without this key")
        if key in _IMPLEMENTATION:
            _check_implementation(title, value)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _check_config(inner, f"{title}.", native, depth + 1)


def _check_implementation(title: str, value: object) -> None:
    for name in value.values() if isinstance(value, dict) else [value]:
        if name is not None and name not in _LOCAL_IMPLEMENTATIONS:
            raise _foreign(f"{title} {shown(name)}", ", ".join(_LOCAL_IMPLEMENTATIONS))


def _foreign(what: str, supported: str) -> UnsupportedError:
    action = "no code of a checkpoint or of the hub is ever run; remove it from config.json"
    return UnsupportedError(f"code that is not transformers' own ({what})", supported, action)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, in order; empty where there are none.

    `model.safetensors`, or the shards that the index names. Raises CheckpointError for an index
    that names anything but files of the folder, and for weights under another name.
    """
    if (folder / SINGLE_NAME).exists():
        return [_checked(folder / SINGLE_NAME)]
    if (folder / INDEX_NAME).exists():
        return [_checked(folder / name) for name in _shards(folder / INDEX_NAME)]
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        text = f"found {', '.join(others[:3])}, but neither {SINGLE_NAME} nor {INDEX_NAME}"
        raise CheckpointError(f"{shown(str(folder), 200)}: {text}; is it an adapter?")
    return []


def _checked(path: Path) -> Path:
    with guarded(path):
        return path


def _shards(path: Path) -> list[str]:
    with guarded(path) as (fd, size):
        if size > MAX_INDEX_BYTES:
            text = f"has {size} bytes; at most {MAX_INDEX_BYTES} are read"
            raise CheckpointError(f"{path.name}: {text}")
        with open(fd, "rb", closefd=False) as file:
            raw = file.read(MAX_INDEX_BYTES)
    try:
        document = strict_json.parse(raw)
    except ValueError as error:
        raise CheckpointError(f"{path.name}: {error}") from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name}: weight_map must be an object of file names")
    names = {name: None for name in weight_map.values() if isinstance(name, str)}
    if len(names) > MAX_SHARDS or not all(isinstance(x, str) for x in weight_map.values()):
        raise CheckpointError(f"{path.name}: weight_map must name at most {MAX_SHARDS} files")
    for name in names:
        problem = bare_name_problem(name)
        if problem is None and not name.endswith(".safetensors"):
            problem = f"{shown(name)} is not a safetensors file"
        if problem is not None:
            raise CheckpointError(f"{path.name}: the shard name {problem}")
    return sorted(names)


def refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError where the folder's only weights are pickles.

    Pickles beside safetensors are common and harmless: nothing here ever opens one.
    """
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PICKLES)
    if pickles and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{shown(str(folder), 200)}: its weights are pickled ({', '.join(pickles[:3])}); "
            "loading those can run any code, so they are never loaded: "
            "use the safetensors version of the model, or convert them to safetensors"
        )
