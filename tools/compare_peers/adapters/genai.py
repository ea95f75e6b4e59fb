"""onnxruntime-genai: its Generator, which for several requests is one static batch.

Its Engine, which would batch continuously, is slower on a CPU and refuses models whose head is
pruned to the last token.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.tools.compare_peers.adapters.base import Clock, LoadSpec, Stream


class Genai:
    """All prompts of a batch must be of one length, which suits static batches: no padding."""

    paths: tuple[str, ...] = ("prefill",)

    def load(self, path: str, spec: LoadSpec) -> None:
        import onnxruntime_genai

        self._lib = onnxruntime_genai
        config = onnxruntime_genai.Config(path)
        session = {"intra_op_num_threads": spec.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)
        decoder = json.loads(Path(path, "genai_config.json").read_text())["model"]["decoder"]
        self._window = decoder.get("sliding_window", {}).get("window_size", 0)

    def version(self) -> str:
        return f"onnxruntime-genai {self._lib.__version__}, Generator"

    def stream(self, prompt: Sequence[int], new: int) -> Stream:
        clock, times, tokens = Clock(), list[float](), list[int]()
        generator = self._started([prompt], new)
        while len(tokens) < new:
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            times.append(clock())
        return Stream(tuple(times), tuple(tokens))

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> list[int]:
        generator = self._started(prompts, new)
        for _ in range(new):
            generator.generate_next_token()
        length = len(prompts[0])
        return [len(generator.get_sequence(row)) - length for row in range(len(prompts))]

    def logits(self, tokens: Sequence[int], path: str) -> npt.NDArray[np.float32]:
        """Raises ValueError for a model whose head is pruned to the last token."""
        logits = np.asarray(self._started([tokens], 2).get_output("logits"), np.float32)
        if logits.shape[1] != len(tokens):
            raise ValueError(f"the model gives logits of {logits.shape[1]} tokens only")
        rows: npt.NDArray[np.float32] = logits[0]
        return rows

    def _started(self, prompts: Sequence[Sequence[int]], new: int) -> Any:
        """A generator that has the prompts. With a sliding window its cache must hold more than
        the window, however short the request is."""
        length = len(prompts[0]) + new
        params = self._lib.GeneratorParams(self._model)
        params.set_search_options(
            do_sample=False,
            batch_size=len(prompts),
            min_length=length,
            max_length=max(length, self._window + 64) if self._window else length,
        )
        generator = self._lib.Generator(self._model, params)
        generator.append_tokens(np.asarray(prompts, np.int32))
        return generator
