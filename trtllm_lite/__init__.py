"""trtllm-lite: from a decoder checkpoint to a verified bundle, and from the bundle to tokens.

`LLM`, `AsyncLLM`, `SamplingParams` and the result types are imported on first use, so that
`import trtllm_lite` and `trtllm-lite --help` stay cheap.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# ONNX Runtime's own builds keep an identifier of the machine and send events to their maker, unless
# told not to before they are loaded. Whoever wants that sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from trtllm_lite.runtime.async_engine import AsyncLLM
    from trtllm_lite.runtime.errors import TrtllmLiteError
    from trtllm_lite.runtime.grammar_spec import GrammarSpec
    from trtllm_lite.runtime.llm import LLM
    from trtllm_lite.runtime.outputs import CompletionOutput, RequestOutput
    from trtllm_lite.runtime.request import SamplingParams

_HOME = {
    "LLM": "trtllm_lite.runtime.llm",
    "AsyncLLM": "trtllm_lite.runtime.async_engine",
    "SamplingParams": "trtllm_lite.runtime.request",
    "GrammarSpec": "trtllm_lite.runtime.grammar_spec",
    "RequestOutput": "trtllm_lite.runtime.outputs",
    "CompletionOutput": "trtllm_lite.runtime.outputs",
    "TrtllmLiteError": "trtllm_lite.runtime.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "GrammarSpec",
    "RequestOutput",
    "SamplingParams",
    "TrtllmLiteError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'trtllm_lite' has no attribute {name!r}")
