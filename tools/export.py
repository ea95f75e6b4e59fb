"""`trtllm-lite export`: from a checkpoint to a verified bundle."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import click

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.command import argument, console_of, option, subcommand
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.failures import needs_extra
from trtllm_lite.tools.options import NUMBER_HELP, Count, json_option
from trtllm_lite.tools.progress import progress_shown

EXAMPLES = (
    "trtllm-lite export HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2",
    "trtllm-lite export ./my-checkpoint -o my-bundle --max-model-len 4K",
    "trtllm-lite export ./my-checkpoint -o my-bundle --quantize int8",
    "trtllm-lite export model.Q4_1.gguf -o bundle --json > report.json",
    "trtllm-lite export ./llama-8b -o bundle --dry-run        # graphs and sizes, no weights",
)


@subcommand("export", examples=EXAMPLES)
@argument("model", "Hugging Face folder, hub id (owner/name), or GGUF file.")
@option("Export", "--output", "-o", required=True, type=click.Path(), help="Bundle folder to make.")
@option(
    "Export",
    "--target",
    default="cpu",
    help="What the graphs are lowered for: cpu, cuda (ONNX Runtime on both) or tensorrt.",
)
@option(
    "Export",
    "--dtype",
    default="auto",
    help="float32, float16 or bfloat16 weights; for cuda and tensorrt also the arithmetic and the "
    "KV cache. Default: float32 for cpu, float16 for the others.",
)
@option(
    "Export",
    "--quantize",
    default="none",
    help="Weights: none, int8, int4, fp8 (tensorrt only), or auto: int8 if its certificate passes, "
    "else none.",
)
@option(
    "Export",
    "--prefill-format",
    help="w8a8: twice as fast on prompts, a second copy of the weights. same: one copy, the decode "
    "format. Default: w8a8 with int8, same with int4.",
)
@option(
    "Export",
    "--kv-dtype",
    default="float32",
    help="KV cache under the native kernels: float32, float16, int8, or auto: float16 where they "
    "run the model and its certificate passes.",
)
@option(
    "Export",
    "--max-model-len",
    type=Count(),
    help=f"Most tokens of a sequence ({NUMBER_HELP}). Default: what the checkpoint declares.",
)
@option("Export", "--max-num-seqs", type=Count(), default=16, help="Requests at the same time.")
@option("Export", "--revision", help="Branch, tag or commit of a hub id.")
@option("Export", "--overwrite", is_flag=True, help="Replace a bundle that is already there.")
@option("Export", "--dry-run", is_flag=True, help="Trace and report; no weights, no bundle.")
@option(
    "Export",
    "--scout/--no-scout",
    default=True,
    help="For float16 arithmetic: compute a few texts first, and keep in float32 what goes beyond.",
)
@option(
    "Export",
    "--attention",
    default="lengths",
    help="For tensorrt, what attention over the cache reads: lengths, which `build` has to put "
    "back after parsing, or mask, which ONNX Runtime's TensorRT providers need.",
)
@option("Export", "--verify/--no-verify", default=True, help="Prove the bundle against the model.")
@json_option
@click.pass_context
def export(ctx: click.Context, /, model: str, output: str, json: bool, **values: Any) -> None:
    """Export a decoder checkpoint to a verified bundle.

    The folder is complete or not there: work happens beside it and is renamed at the end.
    """
    console = console_of(ctx)
    _refuse_meaningless(ctx, values["target"], values["dtype"])
    with needs_extra("export"), libraries_quiet(console):
        from trtllm_lite.exporter.options import ExportOptions
        from trtllm_lite.exporter.pipeline import export as run_export

        options = ExportOptions(model=model, output=Path(output), **values)
        with progress_shown(console.settings) as progress:
            report = run_export(options, progress)
    if json:
        console.json(report.to_json())
    else:
        from trtllm_lite.tools.export_report import show_report

        show_report(console, options, report)


def _refuse_meaningless(ctx: click.Context, target: str, dtype: str) -> None:
    """Raises UsageError for an option that was given and that the target has no use for, whatever
    its value."""
    default = click.core.ParameterSource.DEFAULT
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is not default}
    if target == "cpu" and "scout" in given:
        raise UsageError(
            "--scout, --no-scout: got --target cpu, which computes in float32; leave it out"
        )
    if dtype in ("float32", "bfloat16") and "scout" in given:
        raise UsageError(
            f"--scout, --no-scout: got --dtype {dtype}, which has float32's range; leave it out"
        )
    if target != "tensorrt" and "attention" in given:
        raise UsageError(
            f"--attention: got --target {target}; only the graphs for tensorrt have another form; "
            "leave it out"
        )
    if target in ("cuda", "tensorrt") and "kv_dtype" in given:
        raise UsageError(
            f"--kv-dtype: with --target {target} the cache has the type of --dtype; leave it out"
        )


@contextmanager
def libraries_quiet(console: Console) -> Iterator[None]:
    """Keep what libraries print, warn and log away from the user, except with --debug; stdout is
    for results in any case."""
    if console.settings.debug:
        with redirect_stdout(sys.stderr):
            yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
