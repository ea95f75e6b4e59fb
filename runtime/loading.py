"""From a bundle on disk to the parts that serve it: session, engine, tokenizer, defaults."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_lite.runtime.backends import backend_version, open_session
from trtllm_lite.runtime.backends.base import (
    KernelChoice,
    Session,
    SessionInfo,
    SessionOptions,
    Spin,
)
from trtllm_lite.runtime.backends.choice import (
    BackendChoice,
    Found,
    choose_plans,
    choose_provider,
)
from trtllm_lite.runtime.backends.ort_providers import ProviderChoice
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.chat_template import ChatTemplate
from trtllm_lite.runtime.config import EngineConfig, Speculation
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.engines.store import Need
from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.generation_config import GenerationDefaults, read_generation_config
from trtllm_lite.runtime.grammar import GrammarCompiler
from trtllm_lite.runtime.grammar_compiler import CachedCompiler, open_llguidance
from trtllm_lite.runtime.host import available_memory, physical_cores
from trtllm_lite.runtime.host_cache import HostCache, host_cache
from trtllm_lite.runtime.host_tuning import Tuning
from trtllm_lite.runtime.isolated_template import IsolatedTemplate
from trtllm_lite.runtime.kv_dtype import KVChoice
from trtllm_lite.runtime.manifest import Limits, Manifest
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.native_weights import cache_dtypes, has_native
from trtllm_lite.runtime.progress import NoProgress, Progress
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.session_tuning import Given, Host, tuned_session
from trtllm_lite.runtime.tokenizer import Tokenizer
from trtllm_lite.runtime.verified_files import open_verified

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """How to open a bundle. None stands for what the bundle, or the machine, allows."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 256
    max_model_len: int | None = None
    max_kv_tokens: int | None = None
    intra_op_num_threads: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_bytes: int = 512 * 2**20
    check_hashes: bool = True
    spin: bool | None = None
    speculation: Speculation | None = None
    max_draft_tokens: int = 16
    huge_pages: bool | None = None
    host_cache: bool = True
    kernels: KernelChoice = "auto"
    rounding: Rounding = "fast"
    kv_dtype: KVChoice = "auto"
    isolate_templates: bool = False
    """Render the chat template in a process of its own: for those who serve strangers."""
    kv_bytes: int | None = None
    """Memory of the host for KV; None is half of what is available once the weights have theirs."""
    backend: BackendChoice = "auto"
    provider: ProviderChoice = "auto"


@dataclass(frozen=True)
class Parts:
    """What an `LLM` is made of. `tokenizer` and `grammars` are None for a bundle that takes token
    ids only, `tuning` for a session that was not opened here, or has nothing to tune."""

    engine: Engine
    config: EngineConfig
    tokenizer: Tokenizer | None
    defaults: SamplingParams
    tuning: Tuning | None = None
    grammars: GrammarCompiler | None = None


def load(path: str | Path, options: LoadOptions, progress: Progress | None = None) -> Parts:
    """Open a bundle; `progress` hears of what is done once per machine. Raises BundleError,
    UsageError or MissingExtraError."""
    folder, heard = Path(path), progress or NoProgress()
    cache = _host_cache(folder) if options.host_cache else None
    if options.check_hashes:
        bundle = open_verified(folder, cache, _HashSteps(heard).told)
    else:
        bundle = open_bundle(folder, check_hashes=False)
    found = _found(bundle, options)
    config = _config_within(bundle.manifest, options, found)

    # A backend lets other threads run while it loads. It keeps this one: see `open_graphs`.
    with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
        text = pool.submit(_text_parts, bundle, options.isolate_templates)
        session, tuning = _open_session(bundle, found, config, options, cache, heard)
    _note_other_cache(bundle, session.info)
    with _closed_on_error(session):
        tokenizer, defaults = text.result()
        engine, config = _make_engine(bundle, config, options, defaults, session)
    grammars = _grammars(bundle.manifest, tokenizer, defaults)
    return Parts(engine, config, tokenizer, defaults.params, tuning, grammars)


class _HashSteps:
    """Reports the reading of a bundle's files, and what follows it, as steps."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._begun = False

    def told(self, name: str, done: int, total: int) -> None:
        """`done` of `total` bytes of all files were read."""
        if not self._begun:
            self._begun = True
            self._progress.step("compare the files with their hashes")
        self._progress.advance(done, total, "bytes")
        if done == total:
            self._progress.step("open the graphs")


def engine_config(
    manifest: Manifest, options: LoadOptions, limits: Limits | None = None
) -> EngineConfig:
    """The limits of the engine within those of the bundle, or of what was built of it; KV tokens as
    if memory were no limit. Raises UsageError with both numbers."""
    limits = limits or manifest.limits
    max_num_seqs = _within("max_num_seqs", options.max_num_seqs, limits.max_num_seqs)
    max_model_len = _within("max_model_len", options.max_model_len, limits.max_model_len)
    all_slots = max_num_seqs * max_model_len
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_kv_tokens=all_slots if options.max_kv_tokens is None else options.max_kv_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        prefix_cache_bytes=options.prefix_cache_bytes,
        max_draft_tokens=options.max_draft_tokens,
    )


def kv_tokens_that_fit(config: EngineConfig, bytes_per_token: int, room: int | None) -> int:
    """KV tokens for all slots, or as many as `room` bytes hold. Raises UsageError when that is less
    than one sequence. `room` None: nobody says."""
    wanted = config.max_num_seqs * config.max_model_len
    if room is None:
        return wanted
    fitting = room // bytes_per_token
    if fitting < config.max_model_len:
        raise UsageError(
            f"max_model_len {config.max_model_len} needs {config.max_model_len * bytes_per_token} "
            f"bytes of KV cache; the memory left for it is {room} bytes "
            f"({fitting} tokens); lower max_model_len or set max_kv_tokens"
        )
    return min(wanted, fitting)


def kv_room(given: int | None, available: int | None) -> int | None:
    """Bytes for KV: half of the available memory, and no more than was given."""
    known = [x for x in (given, None if available is None else available // 2) if x is not None]
    return min(known, default=None)


def _room(options: LoadOptions, info: SessionInfo) -> int | None:
    """Bytes for KV that are still to be had; None where all slots have theirs."""
    if info.kv_reserved:
        return None
    return kv_room(options.kv_bytes, available_memory())


def _host_cache(folder: Path) -> HostCache | None:
    """None where there is no bundle, which opening it says better."""
    try:
        return host_cache(folder)
    except BundleError:
        return None


def _text_parts(bundle: Bundle, isolated: bool) -> tuple[Tokenizer | None, GenerationDefaults]:
    tokenizer = None
    if bundle.manifest.tokenizer is not None:
        tokenizer = Tokenizer.from_bundle(bundle, IsolatedTemplate if isolated else ChatTemplate)
    return tokenizer, read_generation_config(bundle)


@contextmanager
def _closed_on_error(session: Session | Found) -> Iterator[None]:
    try:
        yield
    except BaseException:
        session.close()
        raise


def _found(bundle: Bundle, options: LoadOptions) -> Found | None:
    """What runs the bundle on a GPU by itself; None for the backend of its target."""
    chunk = options.max_num_batched_tokens
    found = choose_provider(bundle, options.provider, options.backend, chunk)
    return found or choose_plans(bundle, options.backend, _need(options))


def _need(options: LoadOptions) -> Need:
    """Of plans; what was not asked for is as they have it."""
    return Need(
        options.max_num_seqs or 1, (options.max_model_len or 1) + options.max_num_batched_tokens
    )


def _open_session(
    bundle: Bundle,
    found: Found | None,
    config: EngineConfig,
    options: LoadOptions,
    cache: HostCache | None,
    progress: Progress,
) -> tuple[Session, Tuning | None]:
    alone = SessionOptions(config.max_num_seqs, config.capacity)
    if found is not None:
        return found.open(alone), None
    if bundle.manifest.target == "cuda":
        _refuse_host_options(options)
        return open_session(bundle, alone), None
    return tuned_session(
        lambda session_options: open_session(bundle, session_options),
        SessionOptions(
            num_slots=config.max_num_seqs,
            capacity=config.capacity,
            host_cache=cache,
            kernels=options.kernels,
            rounding=options.rounding,
            kv_dtype=options.kv_dtype,
            progress=progress,
        ),
        Given(options.intra_op_num_threads, _spin(options.spin), options.huge_pages),
        _host(bundle, options),
    )


def _host(bundle: Bundle, options: LoadOptions) -> Host:
    """Private copies of the weights are worth a try where native kernels, which take none, cannot
    run, and twice the weights are far from what is left of the memory."""
    available, size = available_memory(), sum(file.size for file in bundle.manifest.files)
    native = has_native(bundle) and options.kernels != "onnxruntime"
    return Host(
        cores=physical_cores(),
        backend=f"{backend_version(bundle)}, {options.kernels} kernels",
        room_for_copies=not native and available is not None and available > 4 * size,
    )


def _config_within(manifest: Manifest, options: LoadOptions, found: Found | None) -> EngineConfig:
    if found is None:
        return engine_config(manifest, options)
    with _closed_on_error(found):
        _refuse_host_options(options)
        return engine_config(manifest, options, found.limits)


def _refuse_host_options(options: LoadOptions) -> None:
    """What only ONNX Runtime on the CPU has to choose. Raises UsageError."""
    default = LoadOptions()
    for name in _HOST_OPTIONS:
        value = getattr(options, name)
        if value != getattr(default, name):
            raise UsageError(f"{name}: got {value!r}; a GPU has no such choice; leave it out")


_HOST_OPTIONS = ("intra_op_num_threads", "spin", "huge_pages", "kernels", "rounding", "kv_dtype")


def _spin(wanted: bool | None) -> Spin | None:
    if wanted is None:
        return None
    if not isinstance(wanted, bool):
        raise UsageError(f"spin: got {wanted!r}; allowed: True, False or None")
    return "long" if wanted else "brief"


def _make_engine(
    bundle: Bundle,
    config: EngineConfig,
    options: LoadOptions,
    defaults: GenerationDefaults,
    session: Session,
) -> tuple[Engine, EngineConfig]:
    """Memory is measured after the weights have taken theirs."""
    manifest = bundle.manifest
    config = replace(config, speculation=_speculation(options.speculation, session.info))
    if options.max_kv_tokens is None:
        room = _room(options, session.info)
        fitting = kv_tokens_that_fit(config, session.info.kv_bytes_per_token, room)
        config = replace(config, max_kv_tokens=fitting)
    engine = Engine(
        session,
        config,
        vocab_size=manifest.model.vocab_size,
        eos_token_ids=_eos_token_ids(manifest, defaults),
        recompute_at=manifest.kv.recompute_at,
    )
    return engine, config


def _eos_token_ids(manifest: Manifest, defaults: GenerationDefaults) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*manifest.model.eos_token_ids, *defaults.eos_token_ids)))


def _grammars(
    manifest: Manifest, tokenizer: Tokenizer | None, defaults: GenerationDefaults
) -> GrammarCompiler | None:
    """Nothing of it is made, or imported, before the first request that needs it."""
    if tokenizer is None:
        return None
    vocab_size, ends = manifest.model.vocab_size, _eos_token_ids(manifest, defaults)
    return CachedCompiler(lambda: open_llguidance(tokenizer.to_json(), vocab_size, ends))


def _note_other_cache(bundle: Bundle, info: SessionInfo) -> None:
    """Say so where the cache is another one than the bundle was made for, and nobody asked."""
    meant = cache_dtypes(bundle)[:1]
    if meant and info.kernels != "native" and meant[0] != info.kv_dtype:
        _log.warning(
            "the KV cache is %s: only the native kernels have it in %s", info.kv_dtype, meant[0]
        )


def _speculation(wanted: Speculation | None, info: SessionInfo) -> Speculation:
    """What was asked for, or on where drafts can be checked and cannot change a token. The engine
    refuses what it cannot do."""
    if wanted is not None:
        return wanted
    if info.multi_token_decode and info.shape_invariant:
        return "ngram"
    missing = (
        "one result for runs of any shape" if info.multi_token_decode else "multi-token decode"
    )
    _log.info("speculation is off: it needs %s", missing)
    return "off"


def _within(name: str, value: int | None, limit: int) -> int:
    if isinstance(value, int) and value > limit:
        raise UsageError(f"{name}: got {value}; the bundle was made for at most {limit}")
    return limit if value is None else value
