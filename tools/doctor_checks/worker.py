"""The process that runs the steps of one job: `python -m trtllm_lite.tools.doctor_checks.worker`.

Argument: the job's file. On the stdout that it was started with it writes one JSON object a line:
`{"ready": true}`, then `{"result": {...}}` for each name of a step that comes on stdin, one a line.
It ends when stdin does. What libraries print goes to stderr, and they find stdin empty.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from trtllm_lite.tools.doctor_checks.bench import Bench
from trtllm_lite.tools.doctor_checks.jobs import Job, read_job
from trtllm_lite.tools.doctor_checks.result import judged
from trtllm_lite.tools.doctor_checks.sessions import JobBench
from trtllm_lite.tools.doctor_checks.steps import Step, steps_of
from trtllm_lite.tools.doctor_checks.workshop import Workshop


def run_steps(
    job: Job, names: Iterable[str], bench: Bench, shop: Workshop, write: Callable[[str], None]
) -> None:
    """Run the named steps and write the lines of the protocol."""
    steps = {step.name: step for step in steps_of(job)}
    write(json.dumps({"ready": True}))
    for name in names:
        write(json.dumps({"result": _result(steps[name.strip()], job, bench, shop)}))


def _result(step: Step, job: Job, bench: Bench, shop: Workshop) -> dict[str, object]:
    return asdict(judged(step.name, job.lane, lambda: step.run(bench, shop)))


def main(arguments: Sequence[str], shop: Workshop | None = None) -> None:
    """Run what comes on stdin."""
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def write(line: str) -> None:
        out.write(line + "\n")
        out.flush()

    job, shop = read_job(Path(arguments[0])), shop or Workshop()
    bench = JobBench(job, shop)
    try:
        run_steps(job, asked, bench, shop, write)
    finally:
        bench.close()


if __name__ == "__main__":
    main(sys.argv[1:])
