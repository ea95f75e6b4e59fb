"""What --gpu examines: a random model of some shape, lowered for a target, in a folder of its own.

A job and its checks run in a process of their own (`worker.py`): a library that crashes or hangs
takes nobody with it, and a CUDA context that an illegal access has broken is left behind.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trtllm_lite.tools.doctor_checks.bench import Check
from trtllm_lite.tools.doctor_checks.logits_checks import (
    BehindTheLength,
    OneRow,
    PiecesOverCache,
    RaggedRows,
)
from trtllm_lite.tools.doctor_checks.memory_checks import Copies, InPlace, SameAsGraphs
from trtllm_lite.tools.doctor_checks.speed_checks import BUDGET, Throughput, TimePerToken


@dataclass(frozen=True)
class ModelPlan:
    """A model and what is found out with it. `shape`: a name of tools/make_checkpoint.py. `std`: of
    its weights, so large that every token matters."""

    name: str
    shape: str
    std: float
    max_model_len: int
    num_slots: int

    @property
    def capacity(self) -> int:
        return self.max_model_len + BUDGET


TINY = ModelPlan("tiny", "tiny", 0.12, 128, 8)
SMOLLM2 = ModelPlan("SmolLM2-135M's shape", "135m", 0.04, 256, 128)

CORRECTNESS: tuple[Check, ...] = (
    *(OneRow(), RaggedRows(), PiecesOverCache(), BehindTheLength()),
    *(InPlace(), Copies(), SameAsGraphs()),
)
SPEED: tuple[Check, ...] = (TimePerToken(), Throughput())


@dataclass(frozen=True)
class Job:
    """One model on one target. `folder` holds its checkpoint and bundle. `bandwidth`: see Facts."""

    target: str
    dtype: str
    model: ModelPlan
    folder: str
    bandwidth: float | None = None

    @property
    def lane(self) -> str:
        return f"{self.target}, {self.model.name}"

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / f"{self.model.shape}-checkpoint"

    @property
    def bundle(self) -> Path:
        return Path(self.folder) / f"{self.model.shape}-{self.target}"


def checks_of(model: ModelPlan) -> tuple[Check, ...]:
    """The small model is for what is right, the large one for what is fast too."""
    return CORRECTNESS if model == TINY else (OneRow(), RaggedRows(), SameAsGraphs(), *SPEED)


def write_job(job: Job, path: Path) -> None:
    path.write_text(json.dumps(asdict(job)))


def read_job(path: Path) -> Job:
    """What `write_job` wrote."""
    values = json.loads(path.read_text())
    return Job(**{**values, "model": ModelPlan(**values["model"])})
