"""Graphs in the form that `--target tensorrt` has, by hand, and a TensorRT to build them.

Prefill attends over the keys of its own run; decode and extend write into the cache with
TensorScatter and attend over it, with the number of valid tokens of each row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.bundle_files import describe_file
from trtllm_lite.runtime.engines.trt_module import TensorRT, installed_tensorrt
from trtllm_lite.runtime.manifest import (
    GraphSpec,
    KVLayer,
    KVSpec,
    Limits,
    Manifest,
    ModelFacts,
    Phase,
    Quantization,
    Source,
    TensorSpec,
)

PHASES: tuple[Phase, ...] = ("prefill", "decode", "extend")
BLOCK = 32
FORMATS = {
    "int4": TensorProto.INT4,
    "int8": TensorProto.INT8,
    "fp8": TensorProto.FLOAT8E4M3FN,
}
VOCAB, WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 128, 64, 4, 2, 32, 2
ELEMENTS = {"float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}
ELEMENTS |= {"int32": TensorProto.INT32, "float32": TensorProto.FLOAT}


@dataclass
class Builder:
    """Nodes and initializers of one graph as they are made."""

    phase: Phase
    quantized: str = ""
    """Format of the matrices, in blocks of BLOCK rows with a scale; "" leaves them float16."""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)

    def op(self, kind: str, inputs: list[str], output: str = "", **attributes: object) -> str:
        name = f"{kind}_{len(self.nodes)}"
        output = output or name
        self.nodes.append(helper.make_node(kind, inputs, [output], name=name, **attributes))
        return output

    def const(self, name: str, value: npt.ArrayLike, dtype: type = np.int64) -> str:
        self.initializers[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def weight(self, name: str, *shape: int) -> str:
        rng = np.random.default_rng(list(name.encode()))
        values = rng.standard_normal(shape) / np.sqrt(shape[0])
        if not self.quantized or name == "embed":
            return self.const(name, values, np.float16)
        kind = FORMATS[self.quantized]
        codes = rng.integers(-7, 8, shape).flatten().tolist()
        self.initializers[f"{name}_codes"] = helper.make_tensor(f"{name}_codes", kind, shape, codes)
        scales = self.const(f"{name}_scales", np.ones((shape[0] // BLOCK, shape[1])), np.float16)
        inputs = [f"{name}_codes", scales]
        return self.op("DequantizeLinear", inputs, name, axis=0, block_size=BLOCK)


def make_graph(phase: Phase, quantized: str = "") -> onnx.ModelProto:
    """The ONNX graph of one phase, weights inside; `quantized`: the format of the matrices."""
    b = Builder(phase, quantized)
    hidden = b.op("Gather", [b.weight("embed", VOCAB, WIDTH), "input_ids"])
    where = b.op("Cast", ["past_lens"], "write_indices", to=TensorProto.INT64)
    lens = ""
    if phase != "prefill":
        size = b.op("Shape", ["input_ids"], start=1, end=2)
        lens = b.op("Add", [where, size], "visible_lens")
    for layer in range(LAYERS):
        hidden = _attention(b, layer, hidden, where, lens)
    if phase != "decode":
        # A row of the chunk's logits that is valid is asked for by its index.
        last = b.op("Unsqueeze", ["logits_indices", b.const("axis", [2])])
        hidden = b.op("GatherND", [hidden, last], batch_dims=1)
    out = b.op("MatMul", [hidden, b.weight("head", WIDTH, VOCAB)])
    b.op("Cast", [out], "logits", to=TensorProto.FLOAT)
    return _model(b, table(phase))


def _attention(b: Builder, layer: int, hidden: str, where: str, lens: str) -> str:
    def project(name: str, heads: int) -> str:
        product = b.op("MatMul", [hidden, b.weight(f"{name}_{layer}", WIDTH, heads * DIM)])
        apart = b.op("Reshape", [product, b.const(f"shape_{heads}", [0, 0, heads, DIM])])
        return b.op("Transpose", [apart], perm=[0, 2, 1, 3])

    query, key, value = (project(n, h) for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))
    query = b.op("Mul", [query, b.const("scale", DIM**-0.5, np.float16)])
    for kind, new in (("key", key), ("value", value)):
        inputs = [f"past_{kind}_{layer}", new, where]
        b.op("TensorScatter", inputs, f"present_{kind}_{layer}", axis=-2, mode="linear")
    if b.phase == "prefill":
        out = b.op("Attention", [query, key, value], scale=1.0, is_causal=1)
    else:
        cache = [f"present_key_{layer}", f"present_value_{layer}"]
        inputs = [query, *cache, "", "", "", lens]
        out = b.op("Attention", inputs, scale=1.0, is_causal=int(b.phase == "extend"))
    out = b.op("Transpose", [out], perm=[0, 2, 1, 3])
    out = b.op("Reshape", [out, b.const("together", [0, 0, HEADS * DIM])])
    out = b.op("MatMul", [out, b.weight(f"o_{layer}", HEADS * DIM, WIDTH)])
    return b.op("Add", [hidden, out])


def table(phase: Phase) -> GraphSpec:
    """The contract of one graph; `query_lens` is not among its inputs, which it does not use."""
    many = phase != "decode"
    ids = TensorSpec("input_ids", "input_ids", "int64", ("batch", "seq" if many else 1))
    inputs = [ids, TensorSpec("past_lens", "past_lens", "int32", ("batch",))]
    if many:
        shape = ("batch", "num_logits")
        inputs.append(TensorSpec("logits_indices", "logits_indices", "int64", shape))
    logits = ("batch", "num_logits" if many else 1, VOCAB)
    outputs = [TensorSpec("logits", "logits", "float32", logits)]
    cache = ("batch", KV_HEADS, "capacity", DIM)
    for i in range(LAYERS):
        inputs.append(TensorSpec(f"past_key_{i}", "past_key", "float16", cache, i))
        inputs.append(TensorSpec(f"past_value_{i}", "past_value", "float16", cache, i))
        outputs.append(TensorSpec(f"present_key_{i}", "present_key", "float16", cache, i))
        outputs.append(TensorSpec(f"present_value_{i}", "present_value", "float16", cache, i))
    return GraphSpec(phase, f"{phase}.onnx", tuple(inputs), tuple(outputs))


def _model(b: Builder, spec: GraphSpec) -> onnx.ModelProto:
    def values(tensors: tuple[TensorSpec, ...]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(t.name, ELEMENTS[t.dtype], t.shape) for t in tensors]

    inside = list(b.initializers.values())
    graph = helper.make_graph(b.nodes, b.phase, values(spec.inputs), values(spec.outputs), inside)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def make_bundle(folder: Path, *, max_num_seqs: int = 4, max_model_len: int = 64) -> Bundle:
    """The three graphs over one file of weights; the manifest is in memory only."""
    folder.mkdir()
    for phase in PHASES:
        model = make_graph(phase)
        options = {"location": "weights.bin", "size_threshold": 1024, "convert_attribute": False}
        (folder / "weights.bin").unlink(missing_ok=True)
        onnx.save_model(model, folder / f"{phase}.onnx", save_as_external_data=True, **options)
    names = [*(f"{phase}.onnx" for phase in PHASES), "weights.bin"]
    manifest = Manifest(
        model=ModelFacts("tiny", "Tiny", 1, LAYERS, WIDTH, VOCAB, None, (0,)),
        source=Source("tiny", "safetensors"),
        target="tensorrt",
        dtype="float16",
        quantization=Quantization(),
        limits=Limits(max_num_seqs, max_model_len),
        kv=KVSpec("float16", tuple(KVLayer(KV_HEADS, DIM) for _ in range(LAYERS))),
        graphs=tuple(table(phase) for phase in PHASES),
        weights="weights.bin",
        files=tuple(describe_file(folder, name) for name in names),
    )
    return Bundle(folder, manifest)


@pytest.fixture(scope="session")
def rtx() -> TensorRT:
    """TensorRT-RTX, which builds without a GPU."""
    for found in installed_tensorrt():
        if found.flavour == "tensorrt_rtx":
            return found
    pytest.skip("TensorRT-RTX is not installed: pip install 'trtllm-lite[rtx]'")


@pytest.fixture(scope="session")
def engine_graph() -> Callable[[Phase], onnx.ModelProto]:
    """The ONNX graph of a phase."""
    return make_graph


@pytest.fixture
def engine_bundle(tmp_path: Path) -> Bundle:
    """A bundle of the `tensorrt` target, of its own for each test."""
    return make_bundle(tmp_path / "bundle")
