"""What is compared: which runtime, in which environment, on which files."""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = "trtllm-lite"
ORT = "trtllm-lite-ort"  # the same without the native kernels
EXACT = "trtllm-lite-exact"  # the same with exact rounding in decoding
WAYS = {"": OURS, ":ort": ORT, ":exact": EXACT}


@dataclass(frozen=True)
class Contender:
    """One runtime on one model file. `bits` is the class in which it competes: the width of most
    weights. `scored` is the path that is asked for logits, where it is not `path` itself."""

    name: str
    peer: str
    python: str
    path: str
    bits: int
    scored: str | None = None


@dataclass(frozen=True)
class _Entry:
    """A row of the catalogue; paths are below the model's folder."""

    name: str
    peer: str
    environment: str
    path: str
    bits: int
    scored: str | None = None


# onnxruntime-genai's head is pruned to the last token, which is its fastest form; logits of all
# tokens come from the same weights with the whole head.
CATALOGUE = (
    _Entry("llama.cpp Q8_0", "llama.cpp", "llama", "Q8_0.gguf", 8),
    _Entry("llama.cpp Q4_K_M", "llama.cpp", "llama", "Q4_K_M.gguf", 4),
    _Entry("llama.cpp Q4_0", "llama.cpp", "llama", "Q4_0.gguf", 4),
    _Entry("ORT-GenAI int8", "onnxruntime-genai", "genai", "genai-int8p", 8, "genai-int8"),
    _Entry("ORT-GenAI int4", "onnxruntime-genai", "genai", "genai-int4p", 4, "genai-int4"),
    _Entry("OpenVINO int8", "openvino-genai", "ov", "openvino-int8", 8),
    _Entry("OpenVINO int4", "openvino-genai", "ov", "openvino-int4", 4),
)


def catalogue(folder: Path, model: str) -> tuple[list[Contender], list[str]]:
    """The peers that are ready below `folder`, and one line for each that is not."""
    ready, missing = [], []
    for entry in CATALOGUE:
        python = folder / entry.environment / "bin" / "python"
        paths = [folder / "models" / model / p for p in (entry.path, entry.scored) if p]
        absent = [str(path) for path in (python, *paths) if not path.exists()]
        if absent:
            missing.append(f"{entry.name} is skipped: no {absent[0]}; run prepare")
            continue
        scored = str(paths[1]) if entry.scored else None
        ready.append(
            Contender(entry.name, entry.peer, str(python), str(paths[0]), entry.bits, scored)
        )
    return ready, missing


def ours(name: str, bundle: Path, bits: int, peer: str = OURS) -> Contender:
    """A bundle, run by the interpreter that runs this."""
    return Contender(f"{OURS} {name}", peer, sys.executable, str(bundle.resolve()), bits)


def parse_ours(text: str) -> Contender:
    """NAME:BITS=FOLDER, or NAME:BITS:ort=FOLDER for ONNX Runtime's operators alone, or
    NAME:BITS:exact=FOLDER for exact rounding. Raises ValueError that says what is allowed."""
    head, _, folder = text.partition("=")
    match = re.fullmatch(r"([^:]+):(\d+)(:ort|:exact|)", head)
    if match is None or not folder:
        raise ValueError(f"got {text!r}; allowed: NAME:BITS[:ort|:exact]=FOLDER")
    if not Path(folder).is_dir():
        raise ValueError(f"no folder {folder!r}; give that of an exported bundle")
    return ours(match[1], Path(folder), int(match[2]), WAYS[match[3]])


def chosen(contenders: Iterable[Contender], only: Sequence[str]) -> list[Contender]:
    """Those whose name holds one of the texts in `only`; all when there are none."""
    return [c for c in contenders if not only or any(text in c.name for text in only)]
