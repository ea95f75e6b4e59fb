"""llama.cpp through the low-level interface of llama-cpp-python.

The requests of a batch share every `llama_decode`, as in llama.cpp's own server, without its HTTP.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.tools.compare_peers.adapters.base import Clock, LoadSpec, Stream

LOGICAL, PHYSICAL = 2048, 512  # tokens of one llama_decode, and of one pass over the weights

# One token of a batch: its id, position, request, and whether its logits are wanted.
Entry = tuple[int, int, int, bool]


class LlamaCpp:
    """Default settings (flash attention "auto", float16 KV cache); one cache region a request."""

    paths: tuple[str, ...] = ("prefill",)

    def load(self, path: str, spec: LoadSpec) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if self._model is None:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._context = llama_cpp.llama_init_from_model(self._model, self._params(spec))
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(LOGICAL, 0, 1)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def _params(self, spec: LoadSpec) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = spec.slots * spec.max_len
        params.n_seq_max = spec.slots
        params.n_batch, params.n_ubatch = LOGICAL, PHYSICAL
        params.n_threads = params.n_threads_batch = spec.threads
        params.kv_unified = False
        return params

    def version(self) -> str:
        return f"llama-cpp-python {self._lib.__version__}, llama_decode"

    def stream(self, prompt: Sequence[int], new: int) -> Stream:
        clock, times, tokens = Clock(), list[float](), list[int]()
        self._clear()
        entries = _prompt(prompt, 0)
        for first in range(0, len(entries), LOGICAL):
            self._decode(entries[first : first + LOGICAL])
        while True:
            tokens.append(self._argmax(-1))
            times.append(clock())
            if len(tokens) == new:
                return Stream(tuple(times), tuple(tokens))
            self._decode([(tokens[-1], len(prompt) + len(tokens) - 1, 0, True)])

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> list[int]:
        self._clear()
        last = self._prefill(prompts)
        made = [[token] for token in last]
        while len(made[0]) < new:
            self._decode(
                (out[-1], len(prompt) + len(out) - 1, row, True)
                for row, (prompt, out) in enumerate(zip(prompts, made, strict=True))
            )
            for row, out in enumerate(made):
                out.append(self._argmax(row))
        return [len(out) for out in made]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The first token of each prompt; as many prompts at once as the batch holds."""
        tokens: list[int] = []
        together = max(1, LOGICAL // len(prompts[0]))
        for first in range(0, len(prompts), together):
            group = prompts[first : first + together]
            self._decode(e for row, p in enumerate(group, first) for e in _prompt(p, row))
            ends = np.cumsum([len(p) for p in group]) - 1
            tokens += [self._argmax(int(end)) for end in ends]
        return tokens

    def logits(self, tokens: Sequence[int], path: str) -> npt.NDArray[np.float32]:
        self._clear()
        self._decode((token, i, 0, True) for i, token in enumerate(tokens))
        pointer = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (len(tokens), self._vocab)).astype(np.float32)

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, False)

    def _decode(self, entries: Iterable[Entry]) -> None:
        batch, count = self._batch, 0
        for token, position, request, wanted in entries:
            batch.token[count], batch.pos[count] = token, position
            batch.n_seq_id[count], batch.seq_id[count][0] = 1, request
            batch.logits[count] = wanted
            count += 1
        batch.n_tokens = count
        if code := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")

    def _argmax(self, index: int) -> int:
        """Of the logits of the batch's entry `index`."""
        pointer = self._lib.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(pointer, (self._vocab,)).argmax())


def _prompt(tokens: Sequence[int], row: int) -> list[Entry]:
    last = len(tokens) - 1
    return [(token, i, row, i == last) for i, token in enumerate(tokens)]
