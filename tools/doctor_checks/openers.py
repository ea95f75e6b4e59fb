"""How the sessions of each target are opened."""

from trtllm_lite.runtime.backends import open_session
from trtllm_lite.runtime.backends.base import Session, SessionOptions
from trtllm_lite.runtime.backends.tensorrt import find_plans
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.store import Need
from trtllm_lite.tools.doctor_checks.sessions import Opener


def opener_of(target: str) -> Opener:
    """With "tensorrt", TensorRT or an error: never ONNX Runtime in its place."""
    return open_plans if target == "tensorrt" else open_session


def open_plans(bundle: Bundle, options: SessionOptions) -> Session:
    """The session over TensorRT plans. Raises what `find_plans` and opening them raise."""
    return find_plans(bundle, Need(options.num_slots, options.capacity)).open(options)
