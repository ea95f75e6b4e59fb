"""The defaults that a model's makers chose: generation_config.json as sampling parameters.

Read as Hugging Face transformers means it: without `do_sample` and without any sampling value the
defaults are greedy. Keys that name nothing we do are left alone; a known key with a value that
cannot be honoured is an error, not a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtllm_lite.runtime import strict_json
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.bundle_files import open_folder, read_small
from trtllm_lite.runtime.errors import BundleError, RequestError
from trtllm_lite.runtime.sampling_params import SamplingParams

MAX_BYTES = 2**20
FIELD = "generation_config"

# Their name -> ours. The first four only mean something when sampling.
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_ALWAYS = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class GenerationDefaults:
    """`params` for requests that bring none, and further end tokens."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    eos_token_ids: tuple[int, ...] = ()


def read_generation_config(bundle: Bundle) -> GenerationDefaults:
    """The defaults of a bundle; greedy where it has none. Raises BundleError naming the key."""
    name = bundle.manifest.generation_config
    if name is None:
        return GenerationDefaults()
    with open_folder(bundle.folder) as root:
        data = read_small(root, name, FIELD, MAX_BYTES)
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise BundleError(FIELD, str(error)) from None
    if not isinstance(document, dict):
        raise BundleError(FIELD, "must be a JSON object")
    return parse_generation_config(document, bundle.manifest.model.vocab_size)


def parse_generation_config(document: Mapping[str, Any], vocab_size: int) -> GenerationDefaults:
    """The defaults in a parsed generation_config.json. null is the same as absent."""
    known = {key: value for key, value in document.items() if value is not None}
    names = _ALWAYS | _SAMPLING if _samples(known) else _ALWAYS
    values = {ours: known[theirs] for theirs, ours in names.items() if theirs in known}
    if not _samples(known):
        values["temperature"] = 0.0
    try:
        params = SamplingParams(**values)
    except RequestError as error:
        theirs = {ours: theirs for theirs, ours in names.items()}[error.param]
        raise BundleError(f"{FIELD}.{theirs}", str(error).partition(": ")[2]) from None
    return GenerationDefaults(params, _eos_token_ids(known.get("eos_token_id", []), vocab_size))


def _samples(known: Mapping[str, Any]) -> bool:
    do_sample = known.get("do_sample", any(key in known for key in _SAMPLING))
    if not isinstance(do_sample, bool):
        raise BundleError(f"{FIELD}.do_sample", f"got {do_sample!r}; allowed: true or false")
    return do_sample


def _eos_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            allowed = f"allowed: integers from 0 to {vocab_size - 1}"
            raise BundleError(f"{FIELD}.eos_token_id", f"got {token!r}; {allowed}")
    return tuple(dict.fromkeys(ids))
