"""The slice of TensorRT's Python API that building needs, as types.

The packages have no type stubs. Names and meanings are those of NVIDIA's documentation of the
Python API; `trt_module.py` knows in what the versions differ.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class Tensor(Protocol):
    """ITensor. A dimension that is not fixed is -1 in `shape`."""

    name: str
    dtype: Any

    @property
    def shape(self) -> Sequence[int]: ...


class Layer(Protocol):
    """ILayer."""

    name: str
    type: Any
    num_inputs: int
    num_outputs: int

    def get_input(self, index: int) -> Tensor | None: ...

    def get_output(self, index: int) -> Tensor: ...


class Attention(Protocol):
    """IAttention. `causal_kind` and `key_value_lengths` are there from TensorRT 11 on."""

    causal: bool
    causal_kind: Any
    key_value_lengths: Tensor | None
    mask: Tensor | None
    decomposable: bool

    def get_input(self, index: int) -> Tensor: ...

    def get_output(self, index: int) -> Tensor: ...


class Shuffle(Layer, Protocol):
    """IShuffleLayer."""

    reshape_dims: Sequence[int]


class Fill(Layer, Protocol):
    """IFillLayer."""

    def set_input(self, index: int, tensor: Tensor) -> None: ...


class MaskNetwork(Protocol):
    """INetworkDefinition. What a mask is made with."""

    def add_constant(self, shape: Sequence[int], weights: Any) -> Layer: ...

    def add_elementwise(self, a: Tensor, b: Tensor, op: Any) -> Layer: ...

    def add_fill(self, shape: Sequence[int], op: Any, output_type: Any) -> Fill: ...

    def add_gather(self, data: Tensor, indices: Tensor, axis: int) -> Layer: ...

    def add_shape(self, tensor: Tensor) -> Layer: ...

    def add_shuffle(self, tensor: Tensor) -> Shuffle: ...


class Network(MaskNetwork, Protocol):
    """INetworkDefinition."""

    num_inputs: int
    num_outputs: int
    num_layers: int

    def get_input(self, index: int) -> Tensor: ...

    def get_output(self, index: int) -> Tensor: ...

    def get_layer(self, index: int) -> Layer: ...

    def add_cast(self, tensor: Tensor, to: Any) -> Layer: ...


class ParserError(Protocol):
    """ParserError."""

    def desc(self) -> str: ...

    def node_name(self) -> str: ...

    def node_operator(self) -> str: ...


class Parser(Protocol):
    """OnnxParser. `path` is where the graph's file lies, beside its external data."""

    num_errors: int

    def parse(self, model: bytes, path: str) -> bool: ...

    def get_error(self, index: int) -> ParserError: ...


class OptimizationProfile(Protocol):
    """IOptimizationProfile."""

    def set_shape(
        self, name: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None: ...


class TimingCache(Protocol):
    """ITimingCache."""

    def serialize(self) -> Any: ...


class Config(Protocol):
    """IBuilderConfig. The two about compute capabilities are those of TensorRT-RTX."""

    progress_monitor: Any
    num_compute_capabilities: int

    def set_compute_capability(self, capability: Any, index: int) -> bool: ...

    def add_optimization_profile(self, profile: OptimizationProfile) -> int: ...

    def create_timing_cache(self, data: bytes) -> TimingCache: ...

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool: ...

    def get_timing_cache(self) -> TimingCache | None: ...

    def set_flag(self, flag: Any) -> None: ...

    def clear_flag(self, flag: Any) -> None: ...


class Builder(Protocol):
    """Builder."""

    def create_network(self, flags: int) -> Network: ...

    def create_builder_config(self) -> Config: ...

    def create_optimization_profile(self) -> OptimizationProfile: ...

    def build_serialized_network(self, network: Network, config: Config) -> Any: ...
