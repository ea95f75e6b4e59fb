"""What a runtime must be able to do to be measured: the seam between the worker and one peer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ADAPTERS = {
    "trtllm-lite": "trtllm_lite.tools.compare_peers.adapters.trtllm_lite:TrtllmLite",
    "trtllm-lite-ort": "trtllm_lite.tools.compare_peers.adapters.trtllm_lite:TrtllmLiteOrt",
    "trtllm-lite-exact": "trtllm_lite.tools.compare_peers.adapters.trtllm_lite:TrtllmLiteExact",
    "llama.cpp": "trtllm_lite.tools.compare_peers.adapters.llama_cpp:LlamaCpp",
    "onnxruntime-genai": "trtllm_lite.tools.compare_peers.adapters.genai:Genai",
    "openvino-genai": "trtllm_lite.tools.compare_peers.adapters.openvino:OpenVino",
    "fake": "trtllm_lite.tools.compare_peers.adapters.fake:Fake",
}


@dataclass(frozen=True)
class LoadSpec:
    """How a model is opened: threads, requests at once, and tokens of one request at most."""

    threads: int
    slots: int
    max_len: int


@dataclass(frozen=True)
class Stream:
    """One greedy request: its new tokens and when each was in Python's hands, in seconds after the
    request was made."""

    times: tuple[float, ...]
    tokens: tuple[int, ...]


class Adapter(Protocol):
    """One runtime, in its own environment. Greedy, end-of-sequence ignored, no prefix cache.

    `paths` names the ways in which logits are computed that can differ in quality, the first being
    that of a prompt.
    """

    paths: tuple[str, ...]

    def load(self, path: str, spec: LoadSpec) -> None:
        """Import the runtime and open the model."""

    def version(self) -> str:
        """The runtime's version and how it was set up, on one line."""

    def stream(self, prompt: Sequence[int], new: int) -> Stream:
        """Exactly `new` tokens after one prompt."""

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> list[int]:
        """How many tokens each prompt got, all handed over at once."""

    def logits(self, tokens: Sequence[int], path: str) -> npt.NDArray[np.float32]:
        """[len(tokens), vocab] logits of one text. May open the model a second time."""


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start


def make_adapter(peer: str) -> Adapter:
    """Raises KeyError for an unknown peer."""
    module, name = ADAPTERS[peer].split(":")
    adapter: Adapter = getattr(import_module(module), name)()
    return adapter
