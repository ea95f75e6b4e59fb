"""`AsyncLLM`: a bundle for asyncio. One engine thread, any number of tasks in front of it."""

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trtllm_lite.runtime.backends.base import KernelChoice
from trtllm_lite.runtime.backends.choice import BackendChoice
from trtllm_lite.runtime.backends.ort_providers import ProviderChoice
from trtllm_lite.runtime.config import EngineConfig, Speculation
from trtllm_lite.runtime.doorbell import Doorbell
from trtllm_lite.runtime.engine import EngineStats
from trtllm_lite.runtime.engine_thread import EngineThread
from trtllm_lite.runtime.kv_dtype import KVChoice
from trtllm_lite.runtime.loading import LoadOptions, Parts, load
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.pending import Pending
from trtllm_lite.runtime.request_maker import ChatOptions, Messages, RequestMaker, Source
from trtllm_lite.runtime.request_stream import RequestStream
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.step_timer import StepTimer
from trtllm_lite.runtime.tokenizer import Tokenizer


class AsyncLLM:
    """An opened bundle that serves the tasks of an event loop. Options, and errors of opening, as
    for `LLM`; opening blocks.

    Use it as an async context manager, or `close` it: requests that are still running then end
    with finish_reason "abort". When the engine itself fails, every stream and every later call
    raises EngineDeadError.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 256,
        max_model_len: int | None = None,
        max_kv_tokens: int | None = None,
        intra_op_num_threads: int | None = None,
        enable_prefix_caching: bool = True,
        prefix_cache_bytes: int = 512 * 2**20,
        check_hashes: bool = True,
        spin: bool | None = None,
        speculation: Speculation | None = None,
        max_draft_tokens: int = 16,
        huge_pages: bool | None = None,
        host_cache: bool = True,
        kernels: KernelChoice = "auto",
        rounding: Rounding = "fast",
        kv_dtype: KVChoice = "auto",
        backend: BackendChoice = "auto",
        provider: ProviderChoice = "auto",
    ) -> None:
        options = LoadOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_kv_tokens=max_kv_tokens,
            intra_op_num_threads=intra_op_num_threads,
            enable_prefix_caching=enable_prefix_caching,
            prefix_cache_bytes=prefix_cache_bytes,
            check_hashes=check_hashes,
            spin=spin,
            speculation=speculation,
            max_draft_tokens=max_draft_tokens,
            huge_pages=huge_pages,
            host_cache=host_cache,
            kernels=kernels,
            rounding=rounding,
            kv_dtype=kv_dtype,
            backend=backend,
            provider=provider,
        )
        self._start(load(bundle, options))

    @classmethod
    def from_parts(cls, parts: Parts) -> Self:
        """An AsyncLLM on parts that exist already, which it then owns."""
        llm = cls.__new__(cls)
        llm._start(parts)
        return llm

    def _start(self, parts: Parts) -> None:
        self._parts = parts
        self._maker = RequestMaker(parts.tokenizer, parts.defaults, parts.config, parts.grammars)
        self._thread = EngineThread(parts.engine, parts.tokenizer)
        self._doorbell: Doorbell | None = None
        # Runs when the AsyncLLM is collected or the interpreter ends, whichever comes first.
        self._finalizer = weakref.finalize(self, self._thread.close)

    @property
    def config(self) -> EngineConfig:
        return self._parts.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError for a bundle that takes token ids only."""
        return self._maker.tokenizer

    def default_params(self) -> SamplingParams:
        """What requests without parameters use: the bundle's generation_config.json."""
        return self._parts.defaults

    async def stats(self) -> EngineStats:
        """The engine's numbers, read between two steps."""
        return await self._thread.stats()

    def last_stats(self) -> EngineStats:
        """The engine's numbers as its last step or command left them. Waits for nothing, and may
        be read as often as one likes: the engine does not notice."""
        return self._thread.last_stats()

    def time_steps(self, timer: StepTimer) -> Pending[None]:
        """Report every step from the next one on to `timer`, on the engine's thread; awaiting the
        answer waits for that. Raises EngineDeadError."""
        return self._thread.time_steps(timer)

    async def submit(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        final_only: bool = False,
        **template_kwargs: Any,
    ) -> RequestStream:
        """Start one request; its results come from the stream: all on the way, or the last one
        alone (`final_only`), which costs less. Tokenizing does not hold up the event loop. Raises
        RequestError when it can never be served, or its id is in use."""
        source = Source(prompt, messages, prompt_token_ids)
        options = ChatOptions(tools, add_generation_prompt, template_kwargs, continue_final_message)
        stream = await self._stream(source, params, options, request_id)
        await stream.start(final_only=final_only)
        return stream

    async def generate(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> RequestOutput:
        """The final result of one request. Cancelling the call ends the request."""
        source = Source(prompt, messages, prompt_token_ids)
        options = ChatOptions(tools, add_generation_prompt, template_kwargs, continue_final_message)
        stream = await self._stream(source, params, options, request_id)
        await stream.start(final_only=True)
        return await anext(stream)

    async def abort(self, request_id: str) -> None:
        """End a request; its slots are free when this returns. An id that is not there, or not any
        more, is no error."""
        await self._thread.abort([request_id])

    async def close(self) -> None:
        """End everything that runs with finish_reason "abort" and free everything. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _stream(
        self,
        source: Source,
        params: SamplingParams | None,
        options: ChatOptions,
        request_id: str | None,
    ) -> RequestStream:
        make = partial(self._maker.make, source, params, options, request_id)
        loop = asyncio.get_running_loop()
        job = await loop.run_in_executor(None, make)
        if self._doorbell is None or self._doorbell.loop is not loop:
            self._doorbell = Doorbell(loop)
        return RequestStream(self._thread, job, self._doorbell)
