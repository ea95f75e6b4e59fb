"""Single operators of the native kernels as ONNX graphs, run with ONNX Runtime."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from trtllm_lite.runtime.kernels import find_kernels
from trtllm_lite.runtime.native_layout import Packing
from trtllm_lite.runtime.short_float import rounded

Array = npt.NDArray[Any]
TYPES = {
    np.dtype(t): helper.np_dtype_to_tensor_dtype(np.dtype(t))
    for t in (np.float32, np.float16, np.int8, np.uint8, np.uint16, np.int32, np.int64)
}


@pytest.fixture(scope="session")
def library() -> str:
    """The compiled kernels. Skips where there are none."""
    found = find_kernels()
    if found.library is None:
        pytest.skip(f"no native kernels: {found.reason}")
    return str(found.library)


@dataclass(frozen=True)
class Node:
    """One operator: its graph inputs and constants in the order of the operator, None where one is
    left out. `feeds` gives the types of graph inputs; their shapes stay open."""

    op: str
    inputs: Sequence[tuple[str, Array | None]]
    constants: frozenset[str] = frozenset()
    attributes: Mapping[str, int | float] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=lambda: {"y": np.float32})
    domain: str = "trtllm_lite"

    @property
    def feeds(self) -> dict[str, Array]:
        return {n: a for n, a in self.inputs if a is not None and n not in self.constants}

    def model(self) -> bytes:
        names = [name if array is not None else "" for name, array in self.inputs]
        node = helper.make_node(
            self.op, names, list(self.outputs), "node", domain=self.domain, **self.attributes
        )
        inputs = [
            helper.make_tensor_value_info(n, TYPES[a.dtype], [None] * a.ndim)
            for n, a in self.feeds.items()
        ]
        outputs = [
            helper.make_tensor_value_info(n, TYPES[np.dtype(t)], None)
            for n, t in self.outputs.items()
        ]
        constants = [
            numpy_helper.from_array(a, n)
            for n, a in self.inputs
            if a is not None and n in self.constants
        ]
        graph = helper.make_graph([node], "one", inputs, outputs, constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(self.domain, 1)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return bytes(onnx.ModelProto.SerializeToString(made))


Open = Callable[..., Any]
Run = Callable[[Node], list[Array]]


@pytest.fixture(scope="session")
def open_node(library: str) -> Open:
    """A session of a node, on as many threads as asked for."""

    def open_node(node: Node, threads: int = 1) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.register_custom_ops_library(library)
        return onnxruntime.InferenceSession(
            node.model(), options, providers=["CPUExecutionProvider"]
        )

    return open_node


@pytest.fixture(scope="session")
def run_node(open_node: Open) -> Run:
    def run(node: Node) -> list[Array]:
        made: list[Array] = open_node(node).run(None, node.feeds)
        return made

    return run


@pytest.fixture(scope="session")
def make_node() -> Callable[..., Node]:
    return Node


@dataclass(frozen=True)
class Weight:
    """A quantized weight: packed as the operators want it, and what it stands for, float64 [n, k].
    `magnitude`: the sizes of what is added up for one element of it."""

    packing: Packing
    codes: Array
    scale: Array
    zero: Array | None
    values: npt.NDArray[np.float64]
    magnitude: npt.NDArray[np.float64]

    @property
    def tensors(self) -> list[tuple[str, Array | None]]:
        return [("codes", self.codes), ("scale", self.scale), ("zero", self.zero)]

    @property
    def attributes(self) -> dict[str, int]:
        p = self.packing
        sizes = {"n": p.n, "k": p.k, "bits": p.bits, "block_size": p.block}
        return sizes | {"exact_tokens": 24}


@pytest.fixture(scope="session")
def random_weight() -> Callable[..., Weight]:
    """A weight of random codes. What fills its last block stands for zero, as exported ones do."""

    def make(packing: Packing, seed: int = 0) -> Weight:
        p = packing
        rng = np.random.default_rng(seed)
        width = p.blocks * p.block
        top = 2**p.bits
        q = rng.integers(0 if p.bits == 4 else 1, top, (p.n, width)).astype(np.uint8)
        scale = rounded(rng.uniform(0.5, 1.5, (p.n, p.blocks)) / top)
        middle = np.full((p.n, p.blocks), 128, np.uint8)
        if p.bits == 4:
            middle = rng.integers(0, 16, (p.n, p.blocks)).astype(np.uint8)
        zeros = np.repeat(middle, p.block, axis=1)
        q[:, p.k :] = zeros[:, p.k :]
        steps = np.repeat(scale, p.block, axis=1).astype(np.float64)
        values = ((q.astype(np.float64) - zeros) * steps)[:, : p.k]
        magnitude = np.abs(values)
        stored: Array = q
        zero: Array | None = None
        if p.bits == 4:
            stored = q[:, 0::2] | (q[:, 1::2] << 4)
            even = np.pad(middle, ((0, 0), (0, p.blocks % 2)))
            zero = even[:, 0::2] | (even[:, 1::2] << 4)
        pieces = list(p.packed(stored, scale, zero))
        packed_zero = np.concatenate([z for _, _, z in pieces]) if p.bits == 4 else None
        return Weight(
            p,
            np.concatenate([c for c, _, _ in pieces]),
            np.concatenate([s for _, s, _ in pieces]),
            packed_zero,
            values,
            magnitude,
        )

    return make
