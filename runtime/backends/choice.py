"""Which backend runs a bundle: what was asked for by name, else what its target is for and can run
here, else ONNX Runtime on the CPU."""

import logging
from typing import Literal, get_args

from trtllm_lite.runtime.backends.tensorrt import FoundPlans, Machinery, find_plans
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.store import Need
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.manifest import Limits

BackendChoice = Literal["auto", "onnxruntime", "tensorrt"]
"""A backend by name, or the best one that the bundle and the machine allow."""

_log = logging.getLogger(__name__)


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


def plan_limits(plans: FoundPlans) -> Limits:
    """What an engine on these plans may have at most."""
    key = plans.stored.record.key
    return Limits(key.max_num_seqs, key.max_model_len)
