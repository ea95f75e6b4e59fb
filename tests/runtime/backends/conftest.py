"""A bundle whose weights are large beside its graphs, to see where they lie in memory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtllm_lite.runtime.bundle import Bundle
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

VOCAB, WIDTH, LAYERS = 64, 1024, 4
HEADS, DIM = 2, 64
CACHE = f"float[batch, {HEADS}, capacity, {DIM}]"
MATRIX_BYTES = WIDTH * WIDTH * 4


def graph(phase: Phase) -> onnx.ModelProto:
    """Logits of a chain of matrices on the token's embedding. The cache passes through; what is
    read of it is its first value, so that it is bound and used."""
    chain = "".join(f"x{i + 1} = MatMul (x{i}, w{i})\n" for i in range(LAYERS))
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 24]>
{phase} (int64[batch, seq] input_ids, int32[batch] past_lens, int32[batch] query_lens,
    int64[batch, num_logits] logits_indices, {CACHE} past_key_0, {CACHE} past_value_0)
    => (float[batch, num_logits, {VOCAB}] logits, {CACHE} present_key_0, {CACHE} present_value_0) {{
    picks = Unsqueeze (logits_indices, axis)
    ids = GatherND <batch_dims = 1> (input_ids, picks)
    x0 = Gather (embed, ids)
    {chain}
    logits = MatMul (x{LAYERS}, head)
    present_key_0 = Identity (past_key_0)
    present_value_0 = Identity (past_value_0)
}}""")
    rng = np.random.default_rng(5)
    shapes = {"embed": (VOCAB, WIDTH), "head": (WIDTH, VOCAB)}
    shapes |= {f"w{i}": (WIDTH, WIDTH) for i in range(LAYERS)}
    arrays = {n: rng.standard_normal(s, np.float32) / WIDTH**0.5 for n, s in shapes.items()}
    names = sorted(arrays, reverse=phase == "decode")
    tensors = [onnx.numpy_helper.from_array(arrays[name], name) for name in names]
    axis = onnx.numpy_helper.from_array(np.array([2]), "axis")
    model.graph.initializer.extend([axis, *tensors])
    return model


def table(phase: Phase) -> GraphSpec:
    cache = ("batch", HEADS, "capacity", DIM)
    inputs = (
        TensorSpec("input_ids", "input_ids", "int64", ("batch", "seq")),
        TensorSpec("past_lens", "past_lens", "int32", ("batch",)),
        TensorSpec("query_lens", "query_lens", "int32", ("batch",)),
        TensorSpec("logits_indices", "logits_indices", "int64", ("batch", "num_logits")),
        TensorSpec("past_key_0", "past_key", "float32", cache, 0),
        TensorSpec("past_value_0", "past_value", "float32", cache, 0),
    )
    outputs = (
        TensorSpec("logits", "logits", "float32", ("batch", "num_logits", VOCAB)),
        TensorSpec("present_key_0", "present_key", "float32", cache, 0),
        TensorSpec("present_value_0", "present_value", "float32", cache, 0),
    )
    return GraphSpec(phase, f"{phase}.onnx", inputs, outputs)


@pytest.fixture
def heavy_bundle(tmp_path: Path) -> Bundle:
    """Two graphs with the same weights, whose files hold them in opposite orders."""
    folder = tmp_path / "heavy"
    folder.mkdir()
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for phase in phases:
        options = {"location": f"{phase}.weights", "size_threshold": 1024}
        path = folder / f"{phase}.onnx"
        onnx.save_model(graph(phase), path, save_as_external_data=True, **options)
    manifest = Manifest(
        model=ModelFacts("heavy", "Heavy", 0, 1, WIDTH, VOCAB, None, (0,)),
        source=Source("heavy", "safetensors"),
        target="cpu",
        dtype="float32",
        quantization=Quantization(),
        limits=Limits(16, 8192),
        kv=KVSpec("float32", (KVLayer(HEADS, DIM),)),
        graphs=tuple(table(phase) for phase in phases),
        weights="prefill.weights",
        files=(),
    )
    return Bundle(folder, manifest)


@pytest.fixture
def memory_in_use() -> Callable[[], int]:
    """Bytes that this process would give back by ending: shared pages count in parts. Skips where
    the system does not tell."""
    path = Path("/proc/self/smaps_rollup")
    if not path.exists():
        pytest.skip("the system does not tell the proportional set size")

    def measure() -> int:
        lines = path.read_text().splitlines()
        return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("Pss:"))

    return measure
