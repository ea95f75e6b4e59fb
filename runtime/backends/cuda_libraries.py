"""The libraries that ONNX Runtime's CUDA provider links to: found where pip puts them, or named.

The packages nvidia-* keep them inside site-packages, where the system's loader does not look;
`onnxruntime.preload_dlls` loads them from there (ONNX Runtime, "Install ONNX Runtime", "Preload
DLLs"), after which whoever links to them finds them loaded.
"""

import ctypes
import logging
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

SHARED, PROVIDER = "libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so"

_log = logging.getLogger(__name__)


def preload_cuda_libraries(ort: Any) -> None:
    """Load what pip has installed of CUDA and cuDNN. What it cannot load is only logged: the
    system's loader may know other places."""
    preload = getattr(ort, "preload_dlls", None)
    if preload is None:
        return
    said = StringIO()
    try:
        with redirect_stdout(said):
            preload(directory="")
    except (OSError, RuntimeError) as error:
        said.write(str(error))
    if said.getvalue().strip():
        _log.info("CUDA libraries: %s", " ".join(said.getvalue().split()))


def missing_cuda_library(ort: Any) -> str:
    """What the loader says of the first library that the CUDA provider lacks; empty where it loads.
    Loads the provider into the process."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        # The provider takes its symbols from this one.
        ctypes.CDLL(str(folder / SHARED), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / PROVIDER))
    except OSError as error:
        return " ".join(str(error).split())
    return ""
