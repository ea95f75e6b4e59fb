"""Which backend runs which target; imported on first use."""

from importlib import import_module
from typing import Any

from trtllm_lite.runtime.backends.base import Session, SessionOptions
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import BundleError

BACKENDS = {
    "cpu": "trtllm_lite.runtime.backends.onnxruntime",
    "cuda": "trtllm_lite.runtime.backends.ort_cuda",
    "tensorrt": "trtllm_lite.runtime.backends.onnxruntime",
}


def open_session(bundle: Bundle, options: SessionOptions) -> Session:
    """Open the bundle with the backend of its target. Raises BundleError for an unknown target."""
    session: Session = _backend(bundle).open_session(bundle, options)
    return session


def open_for_proof(bundle: Bundle, options: SessionOptions) -> Session:
    """A session that computes what the bundle's graphs say, on the CPU whatever the target. Raises
    as `open_session` does."""
    if bundle.manifest.target != "cuda":
        return open_session(bundle, options)
    session: Session = _backend(bundle).open_on_host(bundle, options)
    return session


def backend_version(bundle: Bundle) -> str:
    """The version of what would run the bundle. Raises BundleError for an unknown target,
    MissingExtraError."""
    return f"{bundle.manifest.target} {_backend(bundle).version()}"


def _backend(bundle: Bundle) -> Any:
    target = bundle.manifest.target
    if target not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise BundleError("target", f"{target!r} has no backend here; known: {known}")
    return import_module(BACKENDS[target])
