"""What `bench` tells: the JSON document with all that is needed to compare, and its table."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trtllm_lite import __version__
from trtllm_lite.runtime.host import physical_cores
from trtllm_lite.runtime.manifest import MANIFEST_NAME
from trtllm_lite.runtime.planning.together import Prediction
from trtllm_lite.tools.bench_breakdown import breakdown, spread
from trtllm_lite.tools.bench_run import BenchOptions, Point, Sample
from trtllm_lite.tools.console import Table, format_bytes

if TYPE_CHECKING:
    from trtllm_lite.runtime.bundle import Bundle

SCHEMA = "trtllm-lite-bench/1"
COLUMNS = (
    *("input", "output", "requests", "TTFT ms", "TPOT ms", "tokens/s"),
    *("TTFT planned", "TPOT planned", "limit ms", "of limit"),
)
PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "tokenizers")


@dataclass(frozen=True)
class Limit:
    """The weight-bandwidth limit. `weight_bytes`: what decoding one request reads for a token."""

    weight_bytes: int
    bytes_per_second: float | None

    @property
    def tpot(self) -> float | None:
        """Seconds per token that no decoder beats here; None where bandwidth is unknown."""
        return self.weight_bytes / self.bytes_per_second if self.bytes_per_second else None


def report(
    bundle: "Bundle",
    options: BenchOptions,
    engine: Mapping[str, Any],
    limit: Limit,
    samples: Mapping[Point, list[Sample]],
    predicted: Mapping[Point, Prediction] = MappingProxyType({}),
) -> dict[str, Any]:
    """The whole result as a JSON document; times in seconds. predicted: without speculation."""
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(Path(__file__).resolve().parent),
        "bundle": bundle_facts(bundle),
        "options": {**asdict(options), **engine},
        "limit": {**asdict(limit), "tpot": limit.tpot},
        "results": [
            _result(point, runs, limit, predicted.get(point)) | _breakdown(options, runs)
            for point, runs in samples.items()
        ],
    }


def _result(
    point: Point, runs: list[Sample], limit: Limit, predicted: Prediction | None
) -> dict[str, Any]:
    tpot = spread(t for run in runs for t in run.tpot)
    share = limit.tpot / tpot["median"] if limit.tpot is not None and tpot else None
    return {
        **asdict(point),
        "ttft": spread(t for run in runs for t in run.ttft),
        "tpot": tpot,
        "tokens_per_second": spread(run.throughput for run in runs),
        "predicted": None if predicted is None else asdict(predicted),
        "limit_tpot": limit.tpot,
        "fraction_of_limit": share,
        "draft_tokens": sum(run.draft_tokens for run in runs),
        "accepted_tokens": sum(run.accepted_tokens for run in runs),
    }


def _breakdown(options: BenchOptions, runs: list[Sample]) -> dict[str, Any]:
    if not options.breakdown:
        return {}
    return {"breakdown": breakdown(step for run in runs for step in run.steps)}


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """CPU model, cores, threads, memory and load of this machine."""
    return {
        "cpu": _cpu_model(cpuinfo),
        "physical_cores": physical_cores(),
        "logical_cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
    }


def _cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions of what ran, `more` packages too; those that are not installed are left out."""
    found = {"trtllm-lite": __version__, "python": platform.python_version()}
    for package in PACKAGES + more:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(folder: Path) -> str | None:
    """The git commit of a checkout, "-dirty" with changes; None outside of one or without git."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def bundle_facts(bundle: "Bundle") -> dict[str, Any]:
    """Which bundle ran."""
    manifest = bundle.manifest
    digest = hashlib.sha256((bundle.folder / MANIFEST_NAME).read_bytes()).hexdigest()
    return {
        "sha256": digest,
        "source": manifest.source.id,
        "model_type": manifest.model.model_type,
        "num_parameters": manifest.model.num_parameters,
        "target": manifest.target,
        "dtype": manifest.dtype,
    }


def result_table(document: Mapping[str, Any]) -> Table:
    """One row a point: medians, with least and greatest in brackets."""
    rows = tuple(_row(result) for result in document["results"])
    return Table("Results: median [min, max]", COLUMNS, rows, frozenset(range(len(COLUMNS))))


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    share, least = result["fraction_of_limit"], result["limit_tpot"]
    predicted = result["predicted"] or {}
    return (
        str(result["input_len"]),
        str(result["output_len"]),
        str(result["concurrency"]),
        _spread_text(result["ttft"], 1e3),
        _spread_text(result["tpot"], 1e3),
        _spread_text(result["tokens_per_second"], 1.0),
        _ms(predicted.get("ttft"), 1),
        _ms(predicted.get("tpot"), 2),
        _ms(least, 2),
        "-" if share is None else f"{100 * share:.0f}%",
    )


def _ms(seconds: float | None, digits: int) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.{digits}f}"


def _spread_text(values: Mapping[str, float] | None, scale: float) -> str:
    if values is None:
        return "-"
    middle, low, high = (f"{values[k] * scale:.1f}" for k in ("median", "min", "max"))
    return f"{middle} [{low}, {high}]"


def summary(document: Mapping[str, Any]) -> list[str]:
    """The machine and the limit, in words."""
    box, limit = document["machine"], document["limit"]
    threads = document["options"]["threads"]
    lines = [f"{box['cpu']}, {box['physical_cores']} cores, {threads} threads used"]
    weights, gpu = format_bytes(limit["weight_bytes"]), document["options"].get("gpu")
    if gpu is not None:
        lines.append(f"{gpu}; planned times are the least that is possible")
    if limit["tpot"] is None:
        why = "too little free memory to measure" if gpu is None else "the GPU is not in the table"
        return [*lines, f"Limit: not known, {why} ({weights} weights)"]
    rate = f"{limit['bytes_per_second'] / 1e9:.1f} GB/s"
    predicted = f"{limit['tpot'] * 1e3:.2f} ms a token"
    lines.append(f"Limit: {predicted} for a lone request ({weights} of weights at {rate})")
    drafted, accepted = (
        sum(result[name] for result in document["results"])
        for name in ("draft_tokens", "accepted_tokens")
    )
    return [*lines, f"Speculation: {accepted} of {drafted} guesses right"] if drafted else lines
