"""Environments and model files of the peers, step by step; what is there is not done again."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import trtllm_lite
from trtllm_lite.runtime.errors import TrtllmLiteError

HERE = Path(__file__).resolve().parent
ROOT = Path(trtllm_lite.__file__).resolve().parent.parent

# Environment and what is installed into it, in this order. "genaib" and "ovb" only convert: their
# exporters need torch. llama-cpp-python is compiled for this machine.
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama": (("llama-cpp-python==0.3.36", "numpy"),),
    "genai": (("onnxruntime-genai==0.18.0", "numpy"),),
    "ov": (("openvino-genai==2026.4.1.0", "numpy"),),
    "genaib": (
        ("torch==2.13.0",),
        ("onnxruntime-genai==0.18.0", "transformers==5.24", "onnx", "onnx-ir", "sentencepiece"),
    ),
    "ovb": (("torch==2.13.0",), ("optimum-intel[openvino]==2.2.0", "transformers==4.57.3")),
}
LLAMA_TYPES = ("Q8_0", "Q4_K_M", "Q4_0")
BUILDER_OPTIONS = ("accuracy_level=4", "block_size=32")
PRUNED = "prune_lm_head=true"


class PrepareError(TrtllmLiteError):
    """A step failed; the text names its log."""


@dataclass(frozen=True)
class Step:
    """One command. `made` exists once it has succeeded."""

    name: str
    made: Path
    command: tuple[str, ...]


def environment_steps(folder: Path) -> Iterator[Step]:
    for name, groups in ENVIRONMENTS.items():
        python = folder / name / "bin" / "python"
        yield Step(
            f"environment {name}", python, (sys.executable, "-m", "venv", str(folder / name))
        )
        for number, packages in enumerate(groups):
            stamp = folder / name / f".installed-{number}"
            install = (str(python), "-m", "pip", "install", "--quiet", *packages)
            yield Step(f"install {packages[0]}", stamp, install)


def model_steps(folder: Path, model: str) -> Iterator[Step]:
    """From `source.gguf` (or `hf/` of make_checkpoint, in bfloat16) to each peer's format."""
    home = folder / "models" / model
    yield from _checkpoint_steps(home)
    for kind in LLAMA_TYPES:
        made = home / f"{kind}.gguf"
        python = str(folder / "llama" / "bin" / "python")
        script = str(HERE / "llama_quantize.py")
        command = (python, script, str(home / "F32.gguf"), str(made), kind)
        yield Step(f"llama.cpp {kind}", made, command)
    for bits in ("int8", "int4"):
        for suffix, options in (("", ()), ("p", (PRUNED,))):
            yield _genai_step(folder, home, bits, suffix, options)
        yield _openvino_step(folder, home, bits)


def _checkpoint_steps(home: Path) -> Iterator[Step]:
    module = (sys.executable, "-m", "trtllm_lite.tools.compare_peers.checkpoints")
    source, hf, gguf = home / "source.gguf", home / "hf", home / "F32.gguf"
    reference = (sys.executable, "-m", "trtllm_lite.tools.compare_peers.reference", str(home))
    if source.exists():
        yield Step("float32 checkpoint", hf, (*module, "hf", str(source), str(hf)))
        yield Step("float32 GGUF", gguf, (*module, "gguf", str(source), str(gguf)))
        yield Step("texts and float32 logits", home / "reference.npy", reference)
    else:
        yield Step("bfloat16 GGUF", gguf, (*module, "random", str(hf), str(gguf)))
        yield Step("random texts", home / "texts.json", reference)


def _genai_step(folder: Path, home: Path, bits: str, suffix: str, options: Sequence[str]) -> Step:
    made = home / f"genai-{bits}{suffix}"
    python, script = str(folder / "genaib" / "bin" / "python"), str(HERE / "genai_builder.py")
    paths = ("-i", str(home / "hf"), "-o", str(made), "-c", str(folder / "cache"))
    extra = ("--extra_options", *BUILDER_OPTIONS, *options)
    command = (python, script, *paths, "-p", bits, "-e", "cpu", *extra)
    return Step(f"onnxruntime-genai {bits}{suffix}", made, command)


def _openvino_step(folder: Path, home: Path, bits: str) -> Step:
    made = home / f"openvino-{bits}"
    program = str(folder / "ovb" / "bin" / "optimum-cli")
    task = ("--task", "text-generation-with-past", "--weight-format", bits)
    blocks = ("--group-size", "64", "--ratio", "1.0") if bits == "int4" else ()
    command = (program, "export", "openvino", "-m", str(home / "hf"), *task, *blocks, str(made))
    return Step(f"openvino {bits}", made, command)


def run_steps(
    steps: Sequence[Step], logs: Path, tell: Callable[[str], None], *, keep_going: bool
) -> list[str]:
    """Run what is not done; returns one line for each step that failed. Raises PrepareError at
    the first one unless `keep_going`. A step's half-made output is removed."""
    failed = []
    for step in steps:
        if step.made.exists():
            continue
        tell(step.name)
        log = logs / f"prepare-{step.name.replace(' ', '-')}.txt"
        if _succeeds(step, log):
            continue
        line = f"{step.name} failed; see {log}"
        if not keep_going:
            raise PrepareError(line)
        failed.append(line)
    return failed


def _succeeds(step: Step, log: Path) -> bool:
    with log.open("wb") as out:
        done = subprocess.run(step.command, stdout=out, stderr=out, cwd=ROOT, check=False)
    if done.returncode == 0:
        if not step.made.exists():
            step.made.touch()  # an installation's stamp
        return True
    if step.made.is_dir():
        shutil.rmtree(step.made)
    else:
        step.made.unlink(missing_ok=True)
    return False
