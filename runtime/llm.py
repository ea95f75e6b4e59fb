"""`LLM`: a bundle as a Python object. A thin face on the engine's thread."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trtllm_lite.runtime.backends.base import KernelChoice
from trtllm_lite.runtime.backends.choice import BackendChoice
from trtllm_lite.runtime.backends.ort_providers import ProviderChoice
from trtllm_lite.runtime.config import EngineConfig, Speculation
from trtllm_lite.runtime.engine import EngineStats
from trtllm_lite.runtime.engine_thread import Delivery, EngineThread
from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.host_tuning import Tuning
from trtllm_lite.runtime.kv_dtype import KVChoice
from trtllm_lite.runtime.loading import LoadOptions, Parts, load
from trtllm_lite.runtime.mailbox import WaitingMailbox
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.request_maker import ChatOptions, Job, Messages, RequestMaker, Source
from trtllm_lite.runtime.result_stream import ResultStream
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.step_timer import StepTimer
from trtllm_lite.runtime.tokenizer import Tokenizer

OneOrMoreParams = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An opened bundle that generates. Use it as a context manager, or `close` it.

    Methods may be called from several threads; what they ask for is batched together. An error, or
    Ctrl-C while waiting, ends the requests of that call and leaves the LLM usable.

    max_num_seqs: sequences that run at once; max_model_len: most tokens of one, prompt included.
        Both default to the bundle's limits and cannot exceed them.
    max_num_batched_tokens: tokens computed in one step, and so the largest chunk of a prompt.
    max_kv_tokens: tokens held over all running sequences; past it the youngest wait. By default as
        many as there are slots for, if half of the available memory holds them.
    intra_op_num_threads: threads of the backend; at most the physical cores that this process may
        use are worth having. spin: let them wait at full speed between two steps too, not only
        between two operators. huge_pages: True keeps a private copy of the weights in huge pages,
        False never uses any. What is left at None is measured when a machine opens the bundle for
        the first time, and remembered: `tuning` says what was picked.
    host_cache: keep what is made once per machine (packed weights, measured settings, which files
        were hashed) in the bundle's `.cache` folder or the user's cache folder.
    enable_prefix_caching, prefix_cache_bytes: keep computed prefixes, up to this many bytes.
    check_hashes: compare the sha256 sums of all files; with the host cache, only of those that have
        changed since.
    speculation: "ngram" lets requests guess tokens from their own text and check several in a
        step, unless they say otherwise: the same tokens, sooner where text repeats itself; "off"
        does not. By default on where it cannot change a token (SessionInfo.shape_invariant).
    max_draft_tokens: most tokens guessed at once.
    kernels: whose operators run a quantized bundle: "native" (ours, compiled at installation, for
        x86-64 with AVX-512 VNNI), "onnxruntime", or "auto": ours where they can. rounding: how our
        kernels round activations: "fast" to 8 bits, "exact" as finely as 16 bits where a sequence
        computes at most 24 tokens, as in decoding: slower only with many requests at once.
    kv_dtype: of the KV cache: "auto" is what the bundle was made for, where our kernels run, and
        float32 elsewhere; "float32", "float16" and "int8" are that or an error.
    backend: "tensorrt" runs the plans that `trtllm-lite build` made of a bundle for TensorRT,
        "onnxruntime" its graphs on the CPU; "auto" is the one that the bundle is for, and for
        TensorRT bundles whose plans cannot be run here ONNX Runtime, with a warning that says why.
    provider: "tensorrt" and "nv-tensorrt-rtx" are providers of ONNX Runtime that build TensorRT
        engines by themselves, for bundles of `export --target tensorrt --attention mask`; "auto" is
        none of them.

    Raises BundleError, UsageError or MissingExtraError.
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
        """An LLM on parts that exist already, which it then owns."""
        llm = cls.__new__(cls)
        llm._start(parts)
        return llm

    def _start(self, parts: Parts) -> None:
        self._parts = parts
        self._maker = RequestMaker(parts.tokenizer, parts.defaults, parts.config, parts.grammars)
        self._thread = EngineThread(parts.engine, parts.tokenizer)
        # Runs when the LLM is collected or the interpreter ends, whichever comes first.
        self._finalizer = weakref.finalize(self, self._thread.close)

    @property
    def config(self) -> EngineConfig:
        return self._parts.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError for a bundle that takes token ids only."""
        return self._maker.tokenizer

    @property
    def tuning(self) -> Tuning | None:
        """The settings that the machine's self-test, or the caller, picked; None for an LLM on
        parts that exist already."""
        return self._parts.tuning

    @property
    def device(self) -> str:
        """What runs the graphs: "cpu" or the name of a device."""
        return self._parts.engine.device

    def default_params(self) -> SamplingParams:
        """What requests without parameters use: the bundle's generation_config.json."""
        return self._parts.defaults

    def stats(self) -> EngineStats:
        """The engine's numbers, read between two steps."""
        return self._thread.stats().result()

    def time_steps(self, timer: StepTimer) -> None:
        """Report where the time of every step goes to `timer`, from the next step on and on the
        engine's thread. A `NullTimer` ends that. Raises EngineDeadError."""
        self._thread.time_steps(timer).result()

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        params: OneOrMoreParams = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, or all lists of token ids; results in their order.

        `params` are for all of them, or one each; by default those of `default_params`. A request
        that can never be served raises RequestError before any work is done. One that fails later
        comes back with finish_reason "error" and its text, and the others complete.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError("prompts", "give either prompts or prompt_token_ids")
        if prompt_token_ids is not None:
            many = _as_many_token_ids(prompt_token_ids)
            each = _spread(params, len(many))
            return self._complete(map(self._maker.from_token_ids, many, each))
        texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
        return self._complete(map(self._maker.from_text, texts, _spread(params, len(texts))))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: OneOrMoreParams = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several; one result each.

        `continue_final_message`, with add_generation_prompt False: the answer goes on with the
        last message, an assistant's. `template_kwargs` are further variables of the bundle's chat
        template. Without parameters those of `default_params` are used, and an answer may fill the
        context. Errors as in `generate`.
        """
        options = ChatOptions(tools, add_generation_prompt, template_kwargs, continue_final_message)
        many = _as_many_conversations(messages)
        return self._complete(
            self._maker.from_messages(conversation, each, options)
            for conversation, each in zip(many, _spread(params, len(many)), strict=True)
        )

    def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> ResultStream:
        """Growing results of one prompt, conversation or list of token ids.

        The request starts, or is refused, at once. Closing the stream or leaving its loop ends it.
        Each result holds all of the text so far and, as `delta`, what is new.
        """
        source = Source(prompt, messages, prompt_token_ids)
        options = ChatOptions(tools, add_generation_prompt, template_kwargs, continue_final_message)
        return ResultStream(self._thread, self._maker.make(source, params, options))

    def close(self) -> None:
        """End what is running with finish_reason "abort" and free everything. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _complete(self, jobs: Iterable[Job]) -> list[RequestOutput]:
        made = list(jobs)
        mailboxes = [WaitingMailbox() for _ in made]
        pairs = zip(made, mailboxes, strict=True)
        try:
            self._thread.submit([Delivery(j, m, final_only=True) for j, m in pairs]).result()
            return [mailbox.wait() for mailbox in mailboxes]
        except BaseException:
            self._thread.abort_soon(job.request.id for job in made)
            raise


def _spread(params: OneOrMoreParams, count: int) -> list[SamplingParams | None]:
    """Parameters for each of `count` requests."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError("params", f"got {len(params)} for {count} prompts; give one or as many")
    return list(params)


def _as_many_token_ids(ids: Sequence[int] | Sequence[Sequence[int]]) -> list[Any]:
    """One list of integers is one prompt."""
    many = list(ids)
    return many if all(hasattr(x, "__len__") for x in many) else [many]


def _as_many_conversations(messages: Messages | Sequence[Messages]) -> list[Any]:
    """One list of messages is one conversation; so is what holds neither, which is refused."""
    many = list(messages)
    return many if many and all(isinstance(x, list | tuple) for x in many) else [many]
