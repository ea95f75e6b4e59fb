"""How a session of a bundle is opened on the GPU."""

from trtllm_lite.runtime.backends import open_session
from trtllm_lite.runtime.backends.base import Session, SessionOptions
from trtllm_lite.runtime.backends.tensorrt import TARGET, Machinery, find_plans
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.store import Need


def open_on_gpu(bundle: Bundle, options: SessionOptions) -> Session:
    """With the target "tensorrt", TensorRT or an error: never ONNX Runtime in its place."""
    if bundle.manifest.target == TARGET:
        return open_plans(bundle, options)
    return open_session(bundle, options)


def open_plans(
    bundle: Bundle, options: SessionOptions, machinery: Machinery | None = None
) -> Session:
    """The session over TensorRT plans. Raises what `find_plans` and opening them raise."""
    need = Need(options.num_slots, options.capacity)
    return find_plans(bundle, need, machinery).open(options)
