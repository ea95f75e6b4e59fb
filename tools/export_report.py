"""What an export ends with: files, seconds, memory, the certificate, and what to do next."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from trtllm_lite.tools.console import Console, Table, format_bytes, format_seconds, printable
from trtllm_lite.tools.gates import gate_table

if TYPE_CHECKING:
    from trtllm_lite.exporter.options import ExportOptions
    from trtllm_lite.exporter.pipeline import ExportReport


def show_report(console: Console, options: "ExportOptions", report: "ExportReport") -> None:
    """Tables of the report, then the next commands."""
    if report.manifest.files:
        console.table(_files(report))
    if report.quantize != "none":
        console.table(_formats(report))
    console.table(_steps(report))
    if report.parity is not None:
        console.table(gate_table(report.parity))
    for line in (*_sizes(report), *_closing(options, report)):
        console.out(line)


def _files(report: "ExportReport") -> Table:
    entries = report.manifest.files
    rows = [(printable(entry.path), format_bytes(entry.size)) for entry in entries]
    rows.append(("total", format_bytes(sum(entry.size for entry in entries))))
    return Table("Files", ("file", "size"), tuple(rows), frozenset({1}))


def _formats(report: "ExportReport") -> Table:
    rows = tuple(
        (f.format, str(f.weights), format_bytes(f.nbytes), f"{f.bytes_per_weight:.3f}")
        for f in report.formats
    )
    columns = ("format", "weights", "size", "bytes a weight")
    return Table("Weight formats", columns, rows, frozenset({1, 2, 3}))


def _steps(report: "ExportReport") -> Table:
    rows = [(name, format_seconds(seconds)) for name, seconds in report.seconds.items()]
    rows.append(("total", format_seconds(sum(report.seconds.values()))))
    return Table("Steps", ("step", "time"), tuple(rows), frozenset({1}))


def _sizes(report: "ExportReport") -> list[str]:
    manifest, length = report.manifest, report.manifest.limits.max_model_len
    # Only bundles for the CPU have graphs over another cache beside those of the manifest.
    kind: str = report.kv_dtypes[0] if manifest.target == "cpu" else manifest.kv.dtype
    token = replace(manifest.kv, dtype=kind).bytes_per_token
    cache = f"{format_bytes(token)} a token, {format_bytes(token * length)} for {length} tokens"
    if kind != manifest.kv.dtype:
        cache += f", in {kind} under the native kernels (elsewhere {manifest.kv.dtype})"
    return [
        f"Weights: {format_bytes(report.weight_bytes)} ({_quantized(report)})",
        f"KV cache: {cache}",
        f"Peak memory: {format_bytes(report.peak_rss_bytes)}",
    ]


def _quantized(report: "ExportReport") -> str:
    """What the weights are, and why where the options left it open."""
    made = report.quantize if report.quantize != "none" else report.manifest.dtype
    return f"{made}, because {printable(report.why)}" if report.why else made


def _closing(options: "ExportOptions", report: "ExportReport") -> list[str]:
    if report.output is None:
        return ["Dry run: nothing was written. Leave out --dry-run to make the bundle."]
    folder = shlex.quote(str(report.output))
    lines = [f"Bundle: {report.output}", ""]
    if report.parity is None:
        model = shlex.quote(options.model)
        lines += ["Not verified. To prove it against the model:"]
        lines += [f"  trtllm-lite verify {folder} --reference {model}", ""]
    commands = [f"chat {folder}", f"inspect {folder}", f"bench {folder}"]
    if options.target == "tensorrt":
        commands.insert(0, f"build {folder}")
    return [*lines, "Next:", *(f"  trtllm-lite {command}" for command in commands)]
