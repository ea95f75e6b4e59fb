"""What a worker makes things with, opens them with and compares them to, as one value: all that
touches a GPU or takes the packages of the export. In a dry run another value takes its place."""

from collections.abc import Callable
from dataclasses import dataclass

from trtllm_lite.runtime.backends.base import Session, SessionOptions
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.tools.doctor_checks.bench import ReferenceModel
from trtllm_lite.tools.doctor_checks.jobs import Job
from trtllm_lite.tools.doctor_checks.openers import open_on_gpu
from trtllm_lite.tools.doctor_checks.prepare import build_plans, export_bundle
from trtllm_lite.tools.doctor_checks.reference import EagerReference
from trtllm_lite.tools.doctor_checks.result import Numbers

Opener = Callable[[Bundle, SessionOptions], Session]


def eager_reference(job: Job) -> ReferenceModel:
    """transformers' model of a job's checkpoint."""
    return EagerReference(job.checkpoint, job.dtype)


@dataclass(frozen=True)
class Workshop:
    """`open`: a session of a bundle of any target. Each may raise anything: it fails its step."""

    export: Callable[[Job], Numbers] = export_bundle
    build: Callable[[Job], Numbers] = build_plans
    open: Opener = open_on_gpu
    reference: Callable[[Job], ReferenceModel] = eager_reference
