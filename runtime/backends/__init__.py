"""Which backend runs which target; imported on first use."""

from importlib import import_module

from trtllm_lite.runtime.backends.base import Session, SessionOptions
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import BundleError

BACKENDS = {"cpu": "trtllm_lite.runtime.backends.onnxruntime"}


def open_session(bundle: Bundle, options: SessionOptions) -> Session:
    """Open the bundle with the backend of its target. Raises BundleError for an unknown target."""
    target = bundle.manifest.target
    if target not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise BundleError("target", f"{target!r} has no backend here; known: {known}")
    session: Session = import_module(BACKENDS[target]).open_session(bundle, options)
    return session
