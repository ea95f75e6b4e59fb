"""What --gpu examines: a random model of some shape, lowered for a target, in a folder of its own.

A job and its checks run in a process of their own (`worker.py`): a library that crashes or hangs
takes nobody with it, and a CUDA context that an illegal access has broken is left behind.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trtllm_lite.tools.doctor_checks.bench import Check
from trtllm_lite.tools.doctor_checks.logits_checks import (
    BehindTheLength,
    OneRow,
    PiecesOverCache,
    RaggedRows,
)
from trtllm_lite.tools.doctor_checks.memory_checks import Copies, InPlace, SameAsGraphs
from trtllm_lite.tools.doctor_checks.speed_checks import (
    BUDGET,
    CONCURRENCY,
    Throughput,
    TimePerToken,
)

CORRECTNESS: tuple[Check, ...] = (
    *(OneRow(), RaggedRows(), PiecesOverCache(), BehindTheLength()),
    *(InPlace(), Copies(), SameAsGraphs()),
)
SPEED: tuple[Check, ...] = (TimePerToken(), *(Throughput(count) for count in CONCURRENCY))
LARGE_CHECKS: tuple[Check, ...] = (OneRow(), RaggedRows(), SPEED[0], SameAsGraphs(), *SPEED[1:])
"""The most important first: when the time runs out, it is the last ones that are left out."""

FORM_CHECKS: tuple[Check, ...] = (
    *(OneRow(), RaggedRows(), PiecesOverCache(), InPlace(), SameAsGraphs()),
)

PlanForm = Literal["usual", "shared weights", "single engine"]
"""Of TensorRT plans: see BuildOptions."""

_KINDS = {"right": CORRECTNESS, "fast": LARGE_CHECKS, "all": (*CORRECTNESS, *SPEED)}


@dataclass(frozen=True)
class Times:
    """Seconds. `expected`: on a machine with a GPU and 16 cores; a step is not begun with less.
    `most`: after so many it has failed."""

    expected: float
    most: float


@dataclass(frozen=True)
class ModelPlan:
    """A model and what is found out with it. `shape`: a name of tools/make_checkpoint.py. `std`: of
    its weights, so large that every token matters. `checks`: the small model is for what is
    "right", the large one for what is "fast" too; "all" are those of both."""

    name: str
    shape: str
    std: float
    max_model_len: int
    num_slots: int
    checks: str
    export: Times
    build: Times

    @property
    def capacity(self) -> int:
        return self.max_model_len + BUDGET


TINY = ModelPlan("tiny", "tiny", 0.12, 128, 8, "right", Times(15, 90), Times(20, 120))
SMOLLM2 = ModelPlan(
    "SmolLM2-135M's shape", "135m", 0.04, 256, 128, "fast", Times(30, 120), Times(45, 210)
)


@dataclass(frozen=True)
class Job:
    """One model on one target. `folder` holds its checkpoint and bundle. `bandwidth`: see Facts.
    Plans of another form than the usual one are made of the bundle of the job that is."""

    target: str
    dtype: str
    model: ModelPlan
    folder: str
    bandwidth: float | None = None
    form: PlanForm = "usual"

    @property
    def lane(self) -> str:
        form = "" if self.form == "usual" else f", {self.form}"
        return f"{self.target}, {self.model.name}{form}"

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / f"{self.model.shape}-checkpoint"

    @property
    def bundle(self) -> Path:
        return Path(self.folder) / f"{self.model.shape}-{self.target}"


def checks_of(job: Job) -> tuple[Check, ...]:
    """In the order in which they are run."""
    return _KINDS[job.model.checks] if job.form == "usual" else FORM_CHECKS


def write_job(job: Job, path: Path) -> None:
    path.write_text(json.dumps(asdict(job)))


def read_job(path: Path) -> Job:
    """What `write_job` wrote."""
    values = json.loads(path.read_text())
    model = values["model"]
    times = {name: Times(**model[name]) for name in ("export", "build")}
    return Job(**{**values, "model": ModelPlan(**{**model, **times})})
