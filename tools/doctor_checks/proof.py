"""`doctor --gpu`: the checks of every backend that is installed, on GPU 0, and their record."""

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trtllm_lite import __version__
from trtllm_lite.runtime.errors import MissingExtraError, TrtllmLiteError, UsageError
from trtllm_lite.runtime.planning.gpus import find_gpu
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.doctor_checks.choices import Choice
from trtllm_lite.tools.doctor_checks.files import write_json
from trtllm_lite.tools.doctor_checks.jobs import SMOLLM2, TINY, Job, ModelPlan, PlanForm
from trtllm_lite.tools.doctor_checks.machine import Report
from trtllm_lite.tools.doctor_checks.packages import installed
from trtllm_lite.tools.doctor_checks.result import CheckResult
from trtllm_lite.tools.doctor_checks.runner import WORKER, Runner
from trtllm_lite.tools.doctor_checks.tables import report_tables, result_table

RESULTS_NAME = "doctor-gpu.json"
TARGETS = ("tensorrt", "cuda")


@dataclass(frozen=True)
class ProofPlan:
    """How the proof is made. `limit_s`: for all of it. `worker`: the command of the processes that
    compute, without the job's file. `models`: the small one and, if any, the large one. `forms`: of
    plans, besides the usual one."""

    limit_s: float = 450.0
    worker: tuple[str, ...] = WORKER
    models: tuple[ModelPlan, ...] = (TINY, SMOLLM2)
    dtype: str = "float16"
    forms: tuple[PlanForm, ...] = ("shared weights", "single engine")


@dataclass(frozen=True)
class Proof:
    """What is to be run, and the targets that cannot be, each as a skipped check."""

    jobs: tuple[Job, ...]
    skipped: tuple[CheckResult, ...]


def prove_gpu(
    console: Console,
    report: Report,
    folder: Path,
    *,
    json: bool,
    plan: ProofPlan | None = None,
) -> int:
    """Run everything that this machine can run; the exit code. Raises TrtllmLiteError without a GPU
    or without the packages of the export, OSError for a folder that cannot be written."""
    if not report.machine.gpu.gpus:
        raise TrtllmLiteError(f"--gpu: {report.machine.gpu.problem}")
    if not installed("torch"):
        raise MissingExtraError("torch", "export")
    for package in report.packages:
        if package.problem:
            console.warn(f"{package.name} {package.version}: {package.problem}")
    plan = plan or ProofPlan()
    with tempfile.TemporaryDirectory(prefix="trtllm-lite-doctor-") as work:
        proof = planned(report, Path(work), plan)
        record = Record(folder, report)
        runner = Runner(Path(work), plan.limit_s, plan.worker)
        results = _run_all(console, proof, runner, record)
    _show(console, report, results, record, json=json)
    ran = any(result.status == "passed" for result in results)
    return 0 if ran and not any(result.status == "failed" for result in results) else 1


def planned(report: Report, work: Path, plan: ProofPlan) -> Proof:
    """In the order of importance, which is that in which they are run: small models before large
    ones, so that what is wrong shows before what is slow; the large model's plans, which take
    longest to build, behind all that is needed; what is an option last."""
    bandwidth = bandwidth_of(report.machine.gpu.gpus[0].name)
    found = {choice.target: choice for choice in report.choices}
    usable = [target for target in TARGETS if found[target].on_gpu]
    small, *large = plan.models
    order = [(t, small) for t in usable] + [(t, m) for m in large for t in reversed(usable)]
    jobs = [Job(target, plan.dtype, model, str(work), bandwidth) for target, model in order]
    if "tensorrt" in usable:
        last = (Job("tensorrt", plan.dtype, small, str(work), bandwidth, f) for f in plan.forms)
        jobs += last
    skipped = [_skipped(found[target]) for target in TARGETS if target not in usable]
    return Proof(tuple(jobs), tuple(skipped))


def bandwidth_of(name: str) -> float | None:
    """Bytes a second of a GPU's memory; None for one that the table does not have."""
    try:
        return find_gpu(name).bandwidth
    except UsageError:
        return None


def _skipped(choice: Choice) -> CheckResult:
    reason = "; ".join((choice.reason, *choice.install))
    return CheckResult("all checks", choice.target, "skipped", reason)


class Record:
    """The file with the results; written anew after each of them, so that a machine that goes down
    leaves what was found."""

    def __init__(self, folder: Path, report: Report) -> None:
        self._folder = folder
        self._report = report
        self._start = time.monotonic()
        self._begun = datetime.now(UTC).isoformat(timespec="seconds")
        self.document: dict[str, Any] = {}
        self.path = folder / RESULTS_NAME

    def write(self, results: Sequence[CheckResult]) -> None:
        counts = Counter(result.status for result in results)
        self.document = {
            "trtllm_lite": __version__,
            "begun": self._begun,
            "seconds": round(time.monotonic() - self._start, 1),
            "summary": {name: counts[name] for name in ("passed", "failed", "skipped")},
            "results": [asdict(result) for result in results],
            "machine": self._report.to_json(),
        }
        write_json(self._folder, RESULTS_NAME, self.document)


def _run_all(console: Console, proof: Proof, runner: Runner, record: Record) -> list[CheckResult]:
    results = list(proof.skipped)
    record.write(results)

    def told(result: CheckResult) -> None:
        results.append(result)
        record.write(results)
        said = f" ({result.reason})" if result.reason else ""
        console.info(f"{result.lane}: {result.name}: {result.status}{said}", dim=True)

    for job in proof.jobs:
        runner.run(job, told)
    return results


def _show(
    console: Console, report: Report, results: Sequence[CheckResult], record: Record, *, json: bool
) -> None:
    if json:
        console.json(record.document)
        return
    for table in (*report_tables(report), result_table(results)):
        console.table(table)
    summary = ", ".join(f"{count} {name}" for name, count in record.document["summary"].items())
    console.out(f"{summary}, in {record.document['seconds']} s: {record.path}")
