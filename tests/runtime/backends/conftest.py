"""What the tests of several backends share: manifests, a small model with its computed reference,
and a bundle whose weights are large beside its graphs, to see where they lie in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.manifest import (
    FileEntry,
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

MakeManifest = Callable[..., Manifest]


def manifest_of(
    target: str,
    graphs: Sequence[GraphSpec],
    kv: KVSpec,
    limits: Limits,
    *,
    hidden_size: int,
    vocab_size: int,
    end: int = 0,
    dtype: str = "float32",
    weights: str = "weights.bin",
    files: Sequence[FileEntry] = (),
) -> Manifest:
    """Of a toy with one layer for each of its cache."""
    facts = ModelFacts("toy", "Toy", 1, len(kv.layers), hidden_size, vocab_size, None, (end,))
    return Manifest(
        model=facts,
        source=Source("toy", "safetensors"),
        target=target,
        dtype=dtype,
        quantization=Quantization(),
        limits=limits,
        kv=kv,
        graphs=tuple(graphs),
        weights=weights,
        files=tuple(files),
    )


@pytest.fixture(scope="session")
def make_manifest() -> MakeManifest:
    return manifest_of


@dataclass(frozen=True)
class AttentionModel:
    """Layers of attention with a residual and learned positions, no norms: its sizes, its weights,
    and what it computes."""

    positions: int
    vocab: int = 29
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    layers: int = 2

    @property
    def width(self) -> int:
        return self.heads * self.dim

    @cached_property
    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        rng = np.random.default_rng(7)
        width, kv_width = self.width, self.kv_heads * self.dim
        shapes = {"embed": (self.vocab, width), "pos": (self.positions, width)}
        shapes |= {"head": (width, self.vocab)}
        for i in range(self.layers):
            shapes |= {f"q{i}": (width, width), f"k{i}": (width, kv_width)}
            shapes |= {f"v{i}": (width, kv_width), f"o{i}": (width, width)}
        return {
            n: (rng.standard_normal(s) / s[0] ** 0.5).astype(np.float32) for n, s in shapes.items()
        }

    def reference(self, tokens: list[int], added: float = 0) -> npt.NDArray[np.float64]:
        """Logits [len(tokens), vocab] of a whole sequence, computed from nothing. added: to every
        value behind the embedding."""
        w = {n: a.astype(np.float64) for n, a in self.weights.items()}
        n, groups = len(tokens), self.heads // self.kv_heads
        x = w["embed"][tokens] + w["pos"][:n] + added
        for i in range(self.layers):
            q = (x @ w[f"q{i}"]).reshape(n, self.heads, self.dim)
            k = (x @ w[f"k{i}"]).reshape(n, self.kv_heads, self.dim).repeat(groups, axis=1)
            v = (x @ w[f"v{i}"]).reshape(n, self.kv_heads, self.dim).repeat(groups, axis=1)
            scores = np.einsum("qhd,khd->hqk", q, k) / self.dim**0.5
            scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
            x = x + out.reshape(n, self.width) @ w[f"o{i}"]
        return np.asarray(x @ w["head"])

    def greedy(self, prompt: list[int], count: int) -> tuple[int, ...]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.reference(tokens)[-1].argmax()))
        return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="session")
def make_attention_model() -> Callable[..., Any]:
    """Of so many positions."""
    return AttentionModel


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
    manifest = manifest_of(
        "cpu",
        [table(phase) for phase in phases],
        KVSpec("float32", (KVLayer(HEADS, DIM),)),
        Limits(16, 8192),
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        weights="prefill.weights",
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
