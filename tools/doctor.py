"""`trtllm-lite doctor`: what this machine has, what would run a bundle, and what is missing."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtllm_lite.tools.command import console_of, option, subcommand
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.options import json_option

if TYPE_CHECKING:
    from trtllm_lite.tools.doctor_checks.machine import Report

EXAMPLES = (
    "trtllm-lite doctor",
    "trtllm-lite doctor --json | jq .choices",
    "trtllm-lite doctor --gpu --output results",
)
REPORT_NAME = "doctor.json"


@subcommand("doctor", examples=EXAMPLES)
@option(
    "Doctor",
    "--gpu",
    is_flag=True,
    help="Compute on GPU 0 and compare: small random models through ONNX Runtime and TensorRT, "
    "whichever are installed, in under 8 minutes. Needs the packages of the export.",
)
@option(
    "Doctor",
    "--output",
    "-o",
    type=click.Path(),
    help=f"Folder for {REPORT_NAME} and, with --gpu, the results. Default: none, or doctor-gpu.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, /, gpu: bool, output: str | None, json: bool) -> None:
    """Show what this machine has, what would run a bundle, and what to install.

    Ends with code 1 when nothing here could run a bundle, or when a check of --gpu failed.
    """
    from trtllm_lite.tools.doctor_checks.machine import examine

    console = console_of(ctx)
    report = examine()
    folder = Path(output or "doctor-gpu") if output or gpu else None
    if gpu:
        from trtllm_lite.tools.doctor_checks.proof import prove_gpu

        ctx.exit(prove_gpu(console, report, folder or Path("doctor-gpu"), json=json))
    if folder is not None:
        _write(console, report, folder)
    if json:
        console.json(report.to_json())
    else:
        _show(console, report)
    ctx.exit(0 if report.ready else 1)


def _write(console: Console, report: "Report", folder: Path) -> None:
    from trtllm_lite.tools.doctor_checks.files import write_json

    console.info(f"written: {write_json(folder, REPORT_NAME, report.to_json())}", dim=True)


def _show(console: Console, report: "Report") -> None:
    from trtllm_lite.tools.doctor_checks.tables import report_tables

    for table in report_tables(report):
        console.table(table)
    if not report.ready:
        console.warn("nothing here could run a bundle: pip install 'trtllm-lite[cpu]'")
