"""What `bench --server` tells: the JSON document, with what was aimed at, and its table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_lite.tools.bench_breakdown import spread
from trtllm_lite.tools.bench_program import Idle
from trtllm_lite.tools.bench_report import bundle_facts, commit, machine, versions
from trtllm_lite.tools.bench_server_run import SIDES, Round, Run, ServerBenchOptions
from trtllm_lite.tools.console import Table, format_bytes

if TYPE_CHECKING:
    from trtllm_lite.runtime.bundle import Bundle

SCHEMA = "trtllm-lite-bench-server/1"
SERVER_PACKAGES = ("starlette", "uvicorn", "h11", "orjson", "pydantic")
COLUMNS = ("", "in process", "HTTP", "the server adds", "aim")

Spread = Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """All that was measured. `idle` None: not asked for, or the system does not tell."""

    rounds: Sequence[Round]
    ready: Sequence[float]
    idle: Idle | None


@dataclass(frozen=True)
class _Target:
    """`name` of a result whose median has to stay below `limit`, or to reach it."""

    name: str
    limit: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value < self.limit


TARGETS = (
    _Target("ttft_added_seconds", 0.005),
    _Target("tpot_added_share", 0.03),
    _Target("throughput_share", 0.97, at_least=True),
    _Target("idle_bytes", 200e6),
    _Target("ready_seconds", 3.0),
)


def server_report(
    bundle: "Bundle", options: ServerBenchOptions, engine: Mapping[str, Any], measured: Measured
) -> dict[str, Any]:
    """The whole result as a JSON document; times in seconds."""
    results = _results(measured)
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(SERVER_PACKAGES),
        "commit": commit(Path(__file__).resolve().parent),
        "bundle": bundle_facts(bundle),
        "options": {**asdict(options), **engine},
        "alone": _side_table(measured.rounds, lambda r: r.alone, ("ttft", "tpot")),
        "together": _together(measured.rounds),
        "idle": None if measured.idle is None else asdict(measured.idle),
        "results": results,
        "targets": [_verdict(target, results[target.name]) for target in TARGETS],
    }


def _results(measured: Measured) -> dict[str, Spread | None]:
    """The two sides of a round against each other: what drifts between rounds falls on both."""
    rounds, idle = measured.rounds, measured.idle
    alone = [(r.alone["in_process"], r.alone["http"]) for r in rounds]
    together = [(r.together["in_process"], r.together["http"]) for r in rounds]
    return {
        "ttft_added_seconds": spread(http.ttft - plain.ttft for plain, http in alone),
        "tpot_added_share": spread(http.tpot / plain.tpot - 1 for plain, http in alone),
        "throughput_share": spread(http.throughput / plain.throughput for plain, http in together),
        "idle_bytes": None if idle is None else spread([float(idle.cost)]),
        "ready_seconds": spread(measured.ready),
    }


def _verdict(target: _Target, values: Spread | None) -> dict[str, Any]:
    median = None if values is None else values["median"]
    return {
        "name": target.name,
        "at_least" if target.at_least else "below": target.limit,
        "median": median,
        "met": None if median is None else target.met(median),
    }


def _side_table(
    rounds: Sequence[Round],
    part: Callable[[Round], Mapping[Any, Run]],
    figures: Sequence[str],
) -> dict[str, Any]:
    return {
        side: {name: spread(getattr(part(r)[side], name) for r in rounds) for name in figures}
        for side in SIDES
    }


def _together(rounds: Sequence[Round]) -> dict[str, Any]:
    """CPU time tells who used the cores: the process with the engine, or the client."""
    figures = ("throughput", "engine_cpu", "client_cpu")
    requests = len(rounds[0].together["http"].timings) if rounds else 0
    return {"requests": requests, **_side_table(rounds, lambda r: r.together, figures)}


def server_table(document: Mapping[str, Any]) -> Table:
    """A row for each aim: medians, with least and greatest in brackets."""
    alone, together, results = document["alone"], document["together"], document["results"]
    plain, http = alone["in_process"], alone["http"]
    rates = [together[side]["throughput"] for side in SIDES]
    idle = document["idle"]
    rows = (
        (
            "TTFT ms, 1 request",
            *(_text(side["ttft"], 1e3) for side in (plain, http)),
            _text(results["ttft_added_seconds"], 1e3, "+.2f"),
        ),
        (
            "TPOT ms, 1 request",
            *(_text(side["tpot"], 1e3, ".3f") for side in (plain, http)),
            _text(results["tpot_added_share"], 100, "+.1f") + " %",
        ),
        (
            f"tokens/s, {together['requests']} requests",
            *(_text(rate, 1.0) for rate in rates),
            _text(results["throughput_share"], 100) + " % of it",
        ),
        (
            "idle streams" if idle is None else f"{idle['streams']} idle streams",
            *("-", "-"),
            "-" if idle is None else format_bytes(int(results["idle_bytes"]["median"])),
        ),
        ("start to ready s", "-", _text(results["ready_seconds"], 1.0, ".2f"), "-"),
    )
    aims = ("< 5 ms", "< 3 %", ">= 97 %", "< 200 MB", "< 3 s")
    shown = tuple((*row, aim) for row, aim in zip(rows, aims, strict=True))
    return Table("What the server adds: median [min, max]", COLUMNS, shown, frozenset(range(1, 5)))


def server_summary(document: Mapping[str, Any]) -> list[str]:
    """The machine, who used it, and what was not reached."""
    box, http = document["machine"], document["together"]["http"]
    lines = [f"{box['cpu']}, {box['physical_cores']} cores"]
    if http["client_cpu"] is not None:
        client, engine = http["client_cpu"]["median"], http["engine_cpu"]["median"]
        lines.append(f"CPU with all requests at once: server {engine:.2f} s, client {client:.2f} s")
    missed = [t["name"] for t in document["targets"] if t["met"] is False]
    return [*lines, f"missed: {', '.join(missed)}"] if missed else lines


def _text(values: Spread | None, scale: float, form: str = ".1f") -> str:
    if values is None:
        return "-"
    middle, low, high = (format(values[k] * scale, form) for k in ("median", "min", "max"))
    return f"{middle} [{low}, {high}]"
