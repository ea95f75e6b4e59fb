"""From a bundle on disk to the parts that serve it: session, engine, tokenizer, defaults."""

from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_lite.runtime.backends import open_session
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.generation_config import GenerationDefaults, read_generation_config
from trtllm_lite.runtime.host import available_memory
from trtllm_lite.runtime.manifest import Manifest
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer


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
    spin: bool = False


@dataclass(frozen=True)
class Parts:
    """What an `LLM` is made of. `tokenizer` is None for a bundle that takes token ids only."""

    engine: Engine
    config: EngineConfig
    tokenizer: Tokenizer | None
    defaults: SamplingParams


def load(path: str | Path, options: LoadOptions) -> Parts:
    """Open a bundle. Raises BundleError, UsageError or MissingExtraError."""
    bundle = open_bundle(Path(path), check_hashes=options.check_hashes)
    config = engine_config(bundle.manifest, options)
    tokenizer = Tokenizer.from_bundle(bundle) if bundle.manifest.tokenizer is not None else None
    defaults = read_generation_config(bundle)
    engine, config = _open_engine(bundle, config, options, defaults)
    return Parts(engine, config, tokenizer, defaults.params)


def engine_config(manifest: Manifest, options: LoadOptions) -> EngineConfig:
    """The limits of the engine within those of the bundle; KV tokens as if memory were no limit.
    Raises UsageError with both numbers."""
    limits = manifest.limits
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
    )


def kv_tokens_that_fit(config: EngineConfig, bytes_per_token: int, available: int | None) -> int:
    """KV tokens for all slots, or as many as half of the available memory holds. Raises UsageError
    when that is less than one sequence. `available` None: the system does not say."""
    wanted = config.max_num_seqs * config.max_model_len
    if available is None:
        return wanted
    fitting = available // 2 // bytes_per_token
    if fitting < config.max_model_len:
        raise UsageError(
            f"max_model_len {config.max_model_len} needs {config.max_model_len * bytes_per_token} "
            f"bytes of KV cache; half of the available memory is {available // 2} bytes "
            f"({fitting} tokens); lower max_model_len or set max_kv_tokens"
        )
    return min(wanted, fitting)


def _open_engine(
    bundle: Bundle, config: EngineConfig, options: LoadOptions, defaults: GenerationDefaults
) -> tuple[Engine, EngineConfig]:
    """Memory is measured after the weights have taken theirs."""
    manifest = bundle.manifest
    session = open_session(
        bundle,
        SessionOptions(
            num_slots=config.max_num_seqs,
            capacity=config.capacity,
            intra_op_num_threads=options.intra_op_num_threads,
            spin=options.spin,
        ),
    )
    try:
        if options.max_kv_tokens is None:
            fitting = kv_tokens_that_fit(config, manifest.kv.bytes_per_token, available_memory())
            config = replace(config, max_kv_tokens=fitting)
        eos = dict.fromkeys((*manifest.model.eos_token_ids, *defaults.eos_token_ids))
        engine = Engine(
            session,
            config,
            vocab_size=manifest.model.vocab_size,
            eos_token_ids=tuple(eos),
            recompute_at=manifest.kv.recompute_at,
        )
    except BaseException:
        session.close()
        raise
    return engine, config


def _within(name: str, value: int | None, limit: int) -> int:
    if isinstance(value, int) and value > limit:
        raise UsageError(f"{name}: got {value}; the bundle was made for at most {limit}")
    return limit if value is None else value
