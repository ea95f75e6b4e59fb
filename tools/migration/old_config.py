"""The config.json of a TensorRT-LLM engine or checkpoint, read as flat names and checked.

`trtllm-build` of versions 0.9 to 1.x writes `version`, `pretrained_config` and `build_config`;
`convert_checkpoint.py` writes what becomes `pretrained_config`, alone. Fields: TensorRT-LLM,
`tensorrt_llm/builder.py` (BuildConfig), `tensorrt_llm/plugin/plugin.py` (PluginConfig),
`tensorrt_llm/models/modeling_utils.py` (PretrainedConfig, QuantConfig).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.strict_json import parse, shown

CONFIG_NAME = "config.json"
MAX_BYTES = 4 * 2**20
OLDEST, NEWEST_MAJOR = (0, 9), 1
MODEL, BUILD = "pretrained_config", "build_config"

Value = str | int | float | bool | list[object] | None


@dataclass(frozen=True)
class OldConfig:
    """What was read. `settings`: every leaf under its dotted name, as
    `build_config.plugin_config.context_fmha`; `version` is empty for a checkpoint without one.
    `has_build`: whether it is an engine's."""

    folder: str
    version: str
    has_build: bool
    settings: Mapping[str, Value]

    def text(self, name: str) -> str | None:
        """A text, or None where it is not set. Raises UsageError for anything else."""
        value = self.settings.get(name)
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{name}: got {shown(value)}; allowed: text or null")
        return value

    def count(self, name: str) -> int | None:
        """A whole number from 0 on, or None where it is not set. Raises UsageError."""
        value = self.settings.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(
                f"{name}: got {shown(value)}; allowed: whole numbers from 0 on, or null"
            )
        return value


def read_old_config(path: Path) -> OldConfig:
    """Read an engine's folder, or a config.json. Raises UsageError, OSError."""
    file = path / CONFIG_NAME if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise UsageError(f"{path}: no {CONFIG_NAME} in it; name the folder of one engine")
    with file.open("rb") as handle:
        data = handle.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{file}: has over {MAX_BYTES} bytes; name the engine's {CONFIG_NAME}")
    try:
        document = parse(data)
    except ValueError as error:
        raise UsageError(f"{file}: {error}; name the engine's {CONFIG_NAME}") from None
    return _checked(file, document)


def _checked(file: Path, document: object) -> OldConfig:
    if not isinstance(document, dict):
        raise UsageError(f"{file}: must be a JSON object")
    _refuse_other_kinds(file, document)
    has_build = BUILD in document
    if not has_build:
        document = {"version": document.get("version"), MODEL: _without_version(document)}
    for part in (MODEL, BUILD) if has_build else (MODEL,):
        if not isinstance(document.get(part), dict):
            raise UsageError(f"{file}: {part} must be an object, as trtllm-build writes it")
    settings = {n: v for n, v in _leaves("", document) if n != "version"}
    if not isinstance(settings.get(f"{MODEL}.architecture"), str):
        raise UsageError(f"{file}: no {MODEL}.architecture; is it a decoder's?")
    version = _version(file, document.get("version"), required=has_build)
    return OldConfig(file.resolve().parent.name, version, has_build, settings)


def _refuse_other_kinds(file: Path, document: dict[str, object]) -> None:
    if "builder_config" in document:
        raise UsageError(f"{file}: made by TensorRT-LLM before 0.8; known: 0.9 to 1.x")
    if {MODEL, "architecture"} & document.keys():
        return
    if {"model_type", "architectures"} & document.keys():
        raise UsageError(
            f"{file}: a Hugging Face checkpoint's, not an engine's: trtllm-lite export its folder"
        )
    raise UsageError(f"{file}: neither {MODEL} nor architecture; allowed: TensorRT-LLM's own")


def _without_version(document: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in document.items() if name != "version"}


def _version(file: Path, value: object, *, required: bool) -> str:
    if value is None and not required:
        return ""
    match = re.match(r"(\d+)\.(\d+)", value) if isinstance(value, str) else None
    if match is None or not isinstance(value, str):
        raise UsageError(f"{file}: version is {shown(value)}; known: 0.9 to 1.x")
    found = (int(match[1]), int(match[2]))
    if found < OLDEST or found[0] > NEWEST_MAJOR:
        raise UsageError(f"{file}: made by TensorRT-LLM {shown(value)}; known: 0.9 to 1.x")
    return value


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, Value]]:
    """Dotted names and values; an empty object is a leaf that is not set."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), item)
    elif isinstance(value, dict):
        yield prefix, None
    elif value is None or isinstance(value, str | int | float | list):
        yield prefix, value
