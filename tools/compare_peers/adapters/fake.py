"""A runtime that computes nothing, to test the tool: each token takes `PACE` seconds."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtllm_lite.tools.compare_peers.adapters.base import Clock, LoadSpec, Stream

PACE = 0.001
VOCAB = 32


class Fake:
    """Answers the prompt's tokens over and over. A path that ends in "broken" cannot be loaded; one
    that ends in "mute" answers nothing."""

    paths: tuple[str, ...] = ("prefill", "decode")

    def load(self, path: str, spec: LoadSpec) -> None:
        if path.endswith("broken"):
            raise RuntimeError(f"{path} cannot be loaded")
        self._mute = path.endswith("mute")
        print(f"loaded {path} with {spec.threads} threads")  # noqa: T201 runtimes do; it must not hurt

    def version(self) -> str:
        return "fake 1"

    def stream(self, prompt: Sequence[int], new: int) -> Stream:
        clock, times = Clock(), []
        for _ in range(0 if self._mute else new):
            time.sleep(PACE)
            times.append(clock())
        return Stream(tuple(times), tuple(prompt[i % len(prompt)] for i in range(len(times))))

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> list[int]:
        time.sleep(PACE * new)
        return [new] * len(prompts)

    def logits(self, tokens: Sequence[int], path: str) -> npt.NDArray[np.float32]:
        """Seeded noise; the decode path is a little off."""
        noise = np.random.default_rng(list(tokens)).standard_normal((len(tokens), VOCAB))
        wrong = np.random.default_rng(0).standard_normal(noise.shape) * (path == "decode")
        return (noise + 0.1 * wrong).astype(np.float32)
