"""Which backend runs a bundle: what was asked for by name, else what its target is for and can run
here, else ONNX Runtime on the CPU."""

import logging
from typing import Literal, Protocol, get_args

from trtllm_lite.runtime.backends.base import Session, SessionOptions
from trtllm_lite.runtime.backends.ort_providers import ProviderChoice
from trtllm_lite.runtime.backends.ort_tensorrt import OrtMachinery, find_engine_provider
from trtllm_lite.runtime.backends.tensorrt import FoundPlans, Machinery, find_plans
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.store import Need
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.manifest import Limits

BackendChoice = Literal["auto", "onnxruntime", "tensorrt"]
"""A backend by name, or the best one that the bundle and the machine allow."""

_log = logging.getLogger(__name__)


class Found(Protocol):
    """What runs a bundle on a GPU. Whoever has it opens a session, which then owns the GPU, or
    closes it."""

    @property
    def limits(self) -> Limits:
        """What an engine on it may have at most."""

    def open(self, options: SessionOptions) -> Session: ...

    def close(self) -> None: ...


def choose_plans(
    bundle: Bundle, wanted: BackendChoice, need: Need, machinery: Machinery | None = None
) -> FoundPlans | None:
    """The TensorRT plans to run the bundle with; None for ONNX Runtime.

    With "auto", a `tensorrt` bundle whose plans cannot be run here is left to ONNX Runtime, and a
    warning says why. Raises UsageError for what is no choice or not one for this bundle, and what
    `find_plans` raises where TensorRT was asked for by name.
    """
    if wanted not in get_args(BackendChoice):
        allowed = ", ".join(get_args(BackendChoice))
        raise UsageError(f"backend: got {wanted!r}; allowed: {allowed}")
    target = bundle.manifest.target
    if wanted == "tensorrt" and target != "tensorrt":
        raise UsageError(
            f"backend: got 'tensorrt'; the bundle's target is {target}, which it cannot run; "
            "export with --target tensorrt"
        )
    if wanted == "onnxruntime" or target != "tensorrt":
        return None
    try:
        return find_plans(bundle, need, machinery)
    except TrtllmLiteError as error:
        if wanted == "tensorrt":
            raise
        _log.warning("running on the CPU, which is slow with these graphs: %s", error)
        return None


def choose_provider(
    bundle: Bundle,
    wanted: ProviderChoice,
    backend: BackendChoice,
    chunk: int,
    machinery: OrtMachinery | None = None,
) -> Found | None:
    """The provider of ONNX Runtime to run the bundle with, where one was asked for by name; else
    None. chunk: most tokens of a step. Raises UsageError for what is no choice or not one for this
    bundle, and what `find_engine_provider` raises."""
    if wanted not in get_args(ProviderChoice):
        allowed = ", ".join(get_args(ProviderChoice))
        raise UsageError(f"provider: got {wanted!r}; allowed: {allowed}")
    if wanted == "auto":
        return None
    if backend == "tensorrt":
        raise UsageError(
            f"provider: got {wanted!r}, which is one of ONNX Runtime's, and backend 'tensorrt'; "
            "leave one of them out"
        )
    return find_engine_provider(bundle, wanted, chunk, machinery)
