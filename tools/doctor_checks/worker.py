"""The process that runs the checks of one job: `python -m trtllm_lite.tools.doctor_checks.worker`.

Arguments: the job's file, then the names of what to run, in order. On the stdout that it was
started with it writes one JSON object a line: `{"begin": name}`, then `{"result": {...}}`. What
libraries print goes to stderr.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trtllm_lite.tools.doctor_checks.bench import Bench
from trtllm_lite.tools.doctor_checks.jobs import Job, checks_of, read_job
from trtllm_lite.tools.doctor_checks.openers import opener_of
from trtllm_lite.tools.doctor_checks.prepare import build_plans, export_bundle
from trtllm_lite.tools.doctor_checks.result import Numbers, judged
from trtllm_lite.tools.doctor_checks.sessions import JobBench

EXPORT_S, BUILD_S = 150.0, 240.0


@dataclass(frozen=True)
class Step:
    """One thing that a worker does for a job. `budget_s`: seconds after which it has failed."""

    name: str
    budget_s: float
    run: Callable[[Bench], Numbers]


def steps_of(job: Job) -> tuple[Step, ...]:
    """Everything, in order."""
    making = [Step("export", EXPORT_S, lambda bench: export_bundle(job))]
    if job.target == "tensorrt":
        making.append(Step("build plans", BUILD_S, lambda bench: build_plans(job)))
    checks = (Step(c.name, c.budget_s, c.run) for c in checks_of(job.model))
    return (*making, *checks)


def run_steps(job: Job, names: Sequence[str], bench: Bench, write: Callable[[str], None]) -> None:
    """Run the named steps and write the lines of the protocol."""
    steps = {step.name: step for step in steps_of(job)}
    for name in names:
        step = steps[name]
        write(json.dumps({"begin": name}))
        result = judged(name, job.lane, lambda step=step: step.run(bench))  # type: ignore[misc]  # a lambda with a default has no inferred type
        write(json.dumps({"result": asdict(result)}))


def main(arguments: Sequence[str]) -> None:
    """Run what the arguments say."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(line: str) -> None:
        out.write(line + "\n")
        out.flush()

    job = read_job(Path(arguments[0]))
    bench = JobBench(job, opener_of(job.target))
    try:
        run_steps(job, arguments[1:], bench, write)
    finally:
        bench.close()


if __name__ == "__main__":
    main(sys.argv[1:])
