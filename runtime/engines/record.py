"""What is known of a set of TensorRT plans: engine.json, as frozen values.

A set of plans lies in `<bundle>/engines/<fingerprint>/`: `<phase>.plan` for each graph of the
bundle, or for the extend graph alone, and `engine.json`, written last. The fingerprint is that of
the `EngineKey`: two builds with one key give the same plans. A plan is code for the GPU, so nobody
loads one whose bytes are not those that the record names; `store.py` sees to that.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from trtllm_lite.runtime import strict_json
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import FileEntry, Phase, TensorSpec
from trtllm_lite.runtime.manifest_decode import decode

FORMAT = "trtllm-lite-engines"
FORMAT_VERSION = "1.0"
ENGINES_FOLDER = "engines"
RECORD_NAME = "engine.json"
MAX_RECORD_BYTES = 2**22
MASKS, EXACT = "attention_masks", "no_tf32"
SHARED, SINGLE = "shared_weights", "single_engine"
USER_ALLOCATION = "user_allocation"
"""Flags of a key."""
_FINGERPRINT_CHARS = 32

Flavour = Literal["tensorrt", "tensorrt_rtx"]
"""The Python module whose plans these are. Neither loads those of the other."""


@dataclass(frozen=True)
class DimRange:
    """The sizes that a symbolic dimension of a graph may have; kernels are chosen for `opt`."""

    name: str
    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class Profile:
    """One optimization profile: a range for each symbolic dimension of the graph, its capacity left
    out, which is fixed in the plan."""

    dims: tuple[DimRange, ...]

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether every one of the profile's dimensions is in `sizes` and within its range."""
        return all(d.name in sizes and d.min <= sizes[d.name] <= d.max for d in self.dims)

    def range_of(self, name: str) -> DimRange | None:
        """The range of a dimension; None for one that the graph does not have."""
        return next((d for d in self.dims if d.name == name), None)


@dataclass(frozen=True)
class GraphKey:
    """What a plan is made from: the ONNX file and the ranges of its dimensions. The order of
    `profiles` is that of the plan's optimization profiles."""

    phase: Phase
    graph: FileEntry
    profiles: tuple[Profile, ...]


@dataclass(frozen=True)
class EngineKey:
    """Everything that a set of plans depends on.

    version: of `flavour`, as its module says it. gpus: compute capabilities ("sm89") that the plans
    are for, in ascending order. driver: of the machine that built them on its own GPU; None where
    no GPU took part. max_num_seqs, max_model_len, max_num_batched_tokens: the largest limits of an
    engine that these plans serve. capacity: tokens of a KV slot, fixed in the plans. flags: what
    else was asked of the builder, sorted: attention_masks, no_tf32, shared_weights (plans read the
    matrices where the runtime puts them), single_engine (the extend plan runs all phases; its first
    profile is that of decode), user_allocation. weights: the file that all graphs share.
    """

    flavour: Flavour
    version: str
    gpus: tuple[str, ...]
    driver: str | None
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    capacity: int
    weights: FileEntry
    graphs: tuple[GraphKey, ...]
    flags: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The name of the folder: 32 hexadecimal digits of the SHA-256 of the key."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_CHARS]

    @property
    def is_single(self) -> bool:
        """Whether there is one plan, of the extend graph, for all phases."""
        return SINGLE in self.flags

    def graph(self, phase: Phase) -> GraphKey | None:
        """The key of one plan; None where there is none of that phase."""
        return next((g for g in self.graphs if g.phase == phase), None)


@dataclass(frozen=True)
class PlanRecord:
    """One serialized plan.

    attention_layers: attention layers of the network. lengths_set: those that were given the
    number of valid tokens of each row. lower_right: those of them whose causal mask was aligned
    with the last valid token. decomposed: those that TensorRT may compute in several steps.
    weights_bytes, scratch_bytes, activation_bytes: of device memory, as the builder reported them,
    None where it did not; scratch is a part of activation, which contexts can share.
    """

    phase: Phase
    file: FileEntry
    attention_layers: int
    lengths_set: int
    lower_right: int
    decomposed: int
    weights_bytes: int | None
    scratch_bytes: int | None
    activation_bytes: int | None


@dataclass(frozen=True)
class SharedWeight:
    """A matrix that plans read as an input of this name. Its `length` bytes stand in the weights
    file of the bundle (`EngineKey.weights`) from `offset` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class EngineRecord:
    """All of engine.json. Paths of `plans` are bare names in its own folder. `weights`: what plans
    with shared weights have as inputs; none otherwise."""

    key: EngineKey
    plans: tuple[PlanRecord, ...]
    producer: str
    weights: tuple[SharedWeight, ...] = ()
    format: str = FORMAT
    format_version: str = FORMAT_VERSION

    def plan(self, phase: Phase) -> PlanRecord | None:
        """The plan of one phase; None where there is none."""
        return next((p for p in self.plans if p.phase == phase), None)


def shape_at(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor of the contract where its symbolic dimensions have these sizes. Raises
    KeyError for a dimension without a size."""
    return tuple(d if isinstance(d, int) else sizes[d] for d in spec.shape)


def render_record(record: EngineRecord) -> bytes:
    """The bytes of engine.json."""
    return (json.dumps(asdict(record), indent=1) + "\n").encode("ascii")


def parse_record(data: bytes) -> EngineRecord:
    """The record in the bytes of an engine.json. Raises BundleError naming the field."""
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise BundleError(RECORD_NAME, str(error)) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BundleError(RECORD_NAME, "is not a record of trtllm-lite's TensorRT plans")
    if document.get("format_version") != FORMAT_VERSION:
        said = strict_json.shown(document.get("format_version"))
        raise BundleError(RECORD_NAME, f"has format_version {said}, not {FORMAT_VERSION!r}")
    return decode(EngineRecord, document, strict=True)
