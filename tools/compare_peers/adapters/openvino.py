"""OpenVINO GenAI: its continuous batching pipeline, for one request and for several."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.tools.compare_peers.adapters.base import Clock, LoadSpec, Stream

BLOCK = 32  # tokens of one block of its KV cache on a CPU


class OpenVino:
    """Default precisions: bfloat16 products and an 8-bit KV cache where the CPU has them."""

    paths: tuple[str, ...] = ("prefill",)

    def __init__(self) -> None:
        self._request: Any = None

    def load(self, path: str, spec: LoadSpec) -> None:
        import openvino
        import openvino_genai

        self._core, self._lib, self._path = openvino, openvino_genai, path
        self._properties = {"INFERENCE_NUM_THREADS": spec.threads}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = spec.slots * (-(-spec.max_len // BLOCK) + 1)
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            path, scheduler, "CPU", self._properties
        )

    def version(self) -> str:
        version = self._lib.__version__.split("-")[0]
        return f"openvino-genai {version}, ContinuousBatchingPipeline"

    def stream(self, prompt: Sequence[int], new: int) -> Stream:
        clock, times = Clock(), list[float]()

        class Streamer(self._lib.StreamerBase):  # type: ignore[name-defined, misc]  # dynamic base
            def write(self, token: Any) -> Any:
                times.extend([clock()] * (len(token) if isinstance(token, list) else 1))
                return running

            def end(self) -> None:
                pass

        running = self._lib.StreamingStatus.RUNNING
        result = self._pipeline.generate([self._ids(prompt)], [self._greedy(new)], Streamer())
        return Stream(tuple(times), tuple(result[0].m_generation_ids[0]))

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> list[int]:
        ids = [self._ids(prompt) for prompt in prompts]
        results = self._pipeline.generate(ids, [self._greedy(new)] * len(ids))
        return [len(result.m_generation_ids[0]) for result in results]

    def logits(self, tokens: Sequence[int], path: str) -> npt.NDArray[np.float32]:
        """Through the plain model, whose weights and precisions are those of the pipeline."""
        if self._request is None:
            model = f"{self._path}/openvino_model.xml"
            compiled = self._core.Core().compile_model(model, "CPU", self._properties)
            self._request = compiled.create_infer_request()
        self._request.reset_state()
        length = len(tokens)
        known = {
            "input_ids": np.asarray([tokens], np.int64),
            "attention_mask": np.ones((1, length), np.int64),
            "position_ids": np.arange(length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        names = [port.get_any_name() for port in self._request.model_inputs]
        self._request.infer({name: known[name] for name in names})
        logits: npt.NDArray[np.float32] = np.array(self._request.get_tensor("logits").data[0])
        return logits

    def _ids(self, tokens: Sequence[int]) -> Any:
        return self._core.Tensor(np.asarray([tokens], np.int64))

    def _greedy(self, new: int) -> Any:
        config = self._lib.GenerationConfig()
        config.max_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return config
