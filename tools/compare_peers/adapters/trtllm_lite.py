"""trtllm-lite: a bundle through `LLM`; logits through the session that `LLM` would open."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import trtllm_lite
from trtllm_lite.runtime.backends import open_session
from trtllm_lite.runtime.backends.base import Batch, KernelChoice, Session, SessionOptions
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.host_cache import host_cache
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.tools.compare_peers.adapters.base import Clock, LoadSpec, Stream

CHUNK = 256
VERIFIED = 8  # tokens of a decode run that checks guesses


class TrtllmLite:
    """Default settings but for the limits. Speculation is off: the peers run without it too."""

    paths: tuple[str, ...] = ("prefill", "decode")
    kernels: KernelChoice = "auto"
    rounding: Rounding = "fast"

    def __init__(self) -> None:
        self._session: Session | None = None

    def load(self, path: str, spec: LoadSpec) -> None:
        self._path, self._spec = path, spec
        self._llm = LLM(
            path,
            max_num_seqs=spec.slots,
            max_model_len=spec.max_len,
            intra_op_num_threads=spec.threads,
            enable_prefix_caching=False,
            kernels=self.kernels,
            rounding=self.rounding,
        )

    def version(self) -> str:
        how = f"{self.kernels} kernels, {self.rounding} rounding"
        return f"trtllm-lite {trtllm_lite.__version__}, LLM, {how}"

    def stream(self, prompt: Sequence[int], new: int) -> Stream:
        clock, times, tokens = Clock(), list[float](), tuple[int, ...]()
        for result in self._llm.stream(params=_params(new), prompt_token_ids=list(prompt)):
            now, tokens = clock(), tuple(result.outputs[0].token_ids)
            times += [now] * (len(tokens) - len(times))
        return Stream(tuple(times), tokens)

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> list[int]:
        results = self._llm.generate(
            params=_params(new), prompt_token_ids=[list(prompt) for prompt in prompts]
        )
        return [len(result.outputs[0].token_ids) for result in results]

    def logits(self, tokens: Sequence[int], path: str) -> npt.NDArray[np.float32]:
        """Path "prefill" in chunks of the engine's size, "decode" in runs of as few tokens as it
        is made for."""
        session = self._opened()
        phase: Phase = "decode" if path == "decode" else "prefill"
        step = CHUNK
        if phase == "decode":
            step = VERIFIED if session.info.multi_token_decode else 1
        rows = [
            session.run(_chunk(phase, tokens, start, min(start + step, len(tokens))))[0].copy()
            for start in range(0, len(tokens), step)
        ]
        return np.concatenate(rows)

    def _opened(self) -> Session:
        if self._session is None:
            options = SessionOptions(
                num_slots=1,
                capacity=self._spec.max_len + CHUNK,
                intra_op_num_threads=self._spec.threads,
                host_cache=host_cache(Path(self._path)),
                kernels=self.kernels,
                rounding=self.rounding,
            )
            self._session = open_session(open_bundle(Path(self._path)), options)
        return self._session


class TrtllmLiteOrt(TrtllmLite):
    """The same bundle on ONNX Runtime's own operators alone."""

    kernels: KernelChoice = "onnxruntime"


class TrtllmLiteExact(TrtllmLite):
    """Activations are rounded as finely as 16 bits in decoding."""

    rounding: Rounding = "exact"


def _params(new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, speculation=False)


def _chunk(phase: Phase, tokens: Sequence[int], start: int, stop: int) -> Batch:
    """Tokens [start, stop) of one text in slot 0, with the logits of each."""
    return Batch(
        phase=phase,
        first_slot=0,
        token_ids=np.asarray([tokens[start:stop]], np.int64),
        past_lens=np.asarray([start], np.int32),
        query_lens=np.asarray([stop - start], np.int32),
        context_lens=np.asarray([stop], np.int32),
        logits_indices=np.arange(stop - start, dtype=np.int64)[None],
    )
