"""What is done for a job, step by step, and how long each step may take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtllm_lite.tools.doctor_checks.bench import Bench, Check
from trtllm_lite.tools.doctor_checks.jobs import Job, Times, checks_of
from trtllm_lite.tools.doctor_checks.result import Numbers
from trtllm_lite.tools.doctor_checks.workshop import Workshop


@dataclass(frozen=True)
class Step:
    """One thing that a worker does for a job. `makes`: whether all that follows needs it."""

    name: str
    times: Times
    run: Callable[[Bench, Workshop], Numbers]
    makes: bool = False


def steps_of(job: Job) -> tuple[Step, ...]:
    """Everything, in order."""
    model = job.model
    making = []
    if job.form == "usual":
        making = [Step("export", model.export, lambda _, shop: shop.export(job), makes=True)]
    if job.target == "tensorrt":
        making.append(Step("build plans", model.build, lambda _, shop: shop.build(job), makes=True))
    return (*making, *(_check_step(check) for check in checks_of(job)))


def _check_step(check: Check) -> Step:
    times = Times(check.expected_s, check.budget_s)
    return Step(check.name, times, lambda bench, _: check.run(bench))


def time_to_begin(steps: Sequence[Step]) -> float:
    """Seconds with less than which the first of these steps is not worth beginning: its own, and
    where it makes what others need, theirs up to the first check."""
    total = 0.0
    for step in steps:
        total += step.times.expected
        if not step.makes:
            break
    return total
