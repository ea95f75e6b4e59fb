"""The report and the results as tables."""

from collections.abc import Sequence

from trtllm_lite.tools.console import Table, format_bytes
from trtllm_lite.tools.doctor_checks.choices import FLAVOURS, Choice
from trtllm_lite.tools.doctor_checks.gpu_facts import GpuFacts
from trtllm_lite.tools.doctor_checks.host_facts import HostFacts
from trtllm_lite.tools.doctor_checks.machine import Report
from trtllm_lite.tools.doctor_checks.packages import Package
from trtllm_lite.tools.doctor_checks.result import CheckResult


def report_tables(report: Report) -> list[Table]:
    """In the order in which people ask."""
    machine = report.machine
    tables = [_choices(report.choices), _packages(report), _host(machine.host)]
    return [*tables, _gpus(machine.gpu)]


def result_table(results: Sequence[CheckResult]) -> Table:
    """One row a check, with its reason or its numbers."""
    rows = [(r.lane, r.name, r.status, f"{r.seconds:.1f} s", _findings(r)) for r in results]
    columns = ("model", "check", "result", "time", "numbers, or the reason")
    return Table("Checks", columns, tuple(rows), right=frozenset((3,)))


def _findings(result: CheckResult) -> str:
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.numbers.items())
    return "; ".join(part for part in (result.reason or numbers, *result.notes) if part)


def _choices(found: Sequence[Choice]) -> Table:
    rows = [
        (c.target, c.runs_on or "nothing here", "; ".join((c.reason, *c.install))) for c in found
    ]
    columns = ("target", "would run on", "why, and what to install")
    return Table("What runs a bundle", columns, tuple(rows))


def _packages(report: Report) -> Table:
    ort = report.machine.ort
    notes = dict.fromkeys(FLAVOURS.values(), "another one is found first")
    notes |= dict.fromkeys(ort.flavours, ort.problem or ", ".join(ort.providers))
    rows = [_package(p, notes) for p in report.packages]
    return Table("Packages", ("package", "version", "note"), tuple(rows))


def _package(package: Package, notes: dict[str, str]) -> tuple[str, str, str]:
    note = notes.get(package.name, "") if package.version else ""
    said = "; ".join(part for part in (package.problem, note) if part)
    return package.name, package.version or "-", said


def _host(host: HostFacts) -> Table:
    available = "unknown" if host.available_bytes is None else format_bytes(host.available_bytes)
    memory = "unknown" if host.memory_bytes is None else format_bytes(host.memory_bytes)
    rows = (
        ("system", host.system),
        ("processor", f"{host.processor}, {host.cores} cores"),
        ("instruction sets", " ".join(host.instruction_sets) or "none that matters"),
        ("native kernels", host.kernels or f"not used: {host.kernels_reason}"),
        ("memory", f"{memory}, {available} available"),
        ("huge pages", host.huge_pages or "unknown"),
        ("cache folder", _cache(host)),
        ("open files", _open_files(host)),
    )
    return Table("Machine", ("what", "found"), rows)


def _cache(host: HostFacts) -> str:
    if host.cache_problem:
        return f"{host.cache_folder or 'none'}: {host.cache_problem}; bundles keep their own"
    return host.cache_folder


def _open_files(host: HostFacts) -> str:
    if host.open_files is None:
        return "no limit"
    most = "no limit" if host.open_files_most is None else str(host.open_files_most)
    return f"{host.open_files}, at most {most}"


def _gpus(gpu: GpuFacts) -> Table:
    if not gpu.gpus:
        return Table("GPUs", ("none",), ((gpu.problem,),))
    rows = [
        (str(g.index), g.name, g.sm, format_bytes(g.memory_bytes), format_bytes(g.free_bytes))
        for g in gpu.gpus
    ]
    title = (
        f"GPUs (driver {gpu.driver or 'unknown'}, CUDA {gpu.cuda or 'unknown'}, by {gpu.source})"
    )
    return Table(
        title, ("GPU", "name", "SM", "memory", "free"), tuple(rows), right=frozenset((3, 4))
    )
