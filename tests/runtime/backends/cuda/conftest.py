"""A toy bundle of target "cuda", and a stand-in for ONNX Runtime's CUDA provider.

The stand-in takes its inputs from the addresses that are bound and puts its outputs there, in the
memory of a `FakeDevice`, which is stricter than a GPU's. It computes with ONNX Runtime on the CPU.
"""

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.ort_cuda import CPU, CUDA, open_on
from trtllm_lite.runtime.backends.ort_cuda_session import OrtCudaSession
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

VOCAB, HEADS, KV_HEADS, DIM, LENGTH, BEST = 40, 2, 1, 16, 96, 4
WIDTH = HEADS * DIM
CACHE = f"float[batch, {KV_HEADS}, capacity, {DIM}]"
PHASES: tuple[Phase, ...] = ("prefill", "decode")
WARM_UPS = 1
"""Runs of a `gpu_graph_id` before the one that is captured."""


def toy_graph() -> onnx.ModelProto:
    """One layer: an embedding, attention with rotary embedding, a head."""
    model = onnx.parser.parse_model(f"""<ir_version: 10,
    opset_import: ["" : 23, "com.microsoft" : 1]>
step (int64[batch, seq] input_ids, int32[batch] past_lens, int32[batch] query_lens,
    int32[1] max_total_len, int64[batch, num_logits] logits_indices,
    {CACHE} past_key_0, {CACHE} past_value_0)
    => (float[batch, num_logits, {VOCAB}] logits, float[batch, num_logits, {BEST}] top_logits,
    int64[batch, num_logits, {BEST}] top_ids, {CACHE} present_key_0, {CACHE} present_value_0) {{
    total = Add (past_lens, query_lens)
    last = Sub (total, one)
    x = Gather (embed, input_ids)
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    seen, present_key_0, present_value_0 = com.microsoft.GroupQueryAttention
        <num_heads = {HEADS}, kv_num_heads = {KV_HEADS}, do_rotary = 1>
        (q, k, v, past_key_0, past_value_0, last, max_total_len, cos, sin)
    y = Add (x, seen)
    picks = Unsqueeze (logits_indices, axis)
    rows = GatherND <batch_dims = 1> (y, picks)
    logits = MatMul (rows, head)
    top_logits, top_ids = TopK (logits, best)
}}""")
    rng = np.random.default_rng(3)
    shapes = {
        "embed": (VOCAB, WIDTH),
        "wq": (WIDTH, WIDTH),
        "wk": (WIDTH, KV_HEADS * DIM),
        "wv": (WIDTH, KV_HEADS * DIM),
        "head": (WIDTH, VOCAB),
    }
    arrays: dict[str, Any] = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
    angles = np.arange(LENGTH)[:, None] / 50 ** (np.arange(DIM // 2) / (DIM // 2))
    arrays |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    arrays |= {"one": np.array(1, np.int32), "axis": np.array([2]), "best": np.array([BEST])}
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    model.graph.initializer.extend(tensors)
    return model


def toy_table(phase: Phase) -> GraphSpec:
    cache = ("batch", KV_HEADS, "capacity", DIM)
    inputs = (
        TensorSpec("input_ids", "input_ids", "int64", ("batch", "seq")),
        TensorSpec("past_lens", "past_lens", "int32", ("batch",)),
        TensorSpec("query_lens", "query_lens", "int32", ("batch",)),
        TensorSpec("max_total_len", "max_total_len", "int32", (1,)),
        TensorSpec("logits_indices", "logits_indices", "int64", ("batch", "num_logits")),
        TensorSpec("past_key_0", "past_key", "float32", cache, 0),
        TensorSpec("past_value_0", "past_value", "float32", cache, 0),
    )
    outputs = (
        TensorSpec("logits", "logits", "float32", ("batch", "num_logits", VOCAB)),
        TensorSpec("top_logits", "top_logits", "float32", ("batch", "num_logits", BEST)),
        TensorSpec("top_ids", "top_ids", "int64", ("batch", "num_logits", BEST)),
        TensorSpec("present_key_0", "present_key", "float32", cache, 0),
        TensorSpec("present_value_0", "present_value", "float32", cache, 0),
    )
    return GraphSpec(phase, f"{phase}.onnx", inputs, outputs)


@pytest.fixture
def toy_bundle(tmp_path: Path) -> Bundle:
    data = toy_graph().SerializeToString()
    files = []
    for phase in PHASES:
        (tmp_path / f"{phase}.onnx").write_bytes(data)
        files.append(FileEntry(f"{phase}.onnx", len(data), hashlib.sha256(data).hexdigest()))
    manifest = Manifest(
        model=ModelFacts("toy", "Toy", 1, 1, WIDTH, VOCAB, None, (0,)),
        source=Source("toy", "safetensors"),
        target="cuda",
        dtype="float32",
        quantization=Quantization(),
        limits=Limits(16, LENGTH),
        kv=KVSpec("float32", (KVLayer(KV_HEADS, DIM),)),
        graphs=tuple(toy_table(phase) for phase in PHASES),
        weights="weights.bin",
        files=tuple(files),
    )
    return Bundle(tmp_path, manifest)


@dataclass(frozen=True)
class Place:
    """What an IO binding knows of one tensor."""

    device: str
    dtype: Any
    shape: tuple[int, ...]
    address: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * int(np.dtype(self.dtype).itemsize)


@dataclass
class FakeBinding:
    inputs: dict[str, Place] = field(default_factory=dict)
    outputs: dict[str, Place] = field(default_factory=dict)

    def bind_input(self, name: str, device: str, _: int, dtype: Any, shape: Any, at: int) -> None:
        self.inputs[name] = Place(device, dtype, tuple(shape), at)

    def bind_output(self, name: str, device: str, _: int, dtype: Any, shape: Any, at: int) -> None:
        self.outputs[name] = Place(device, dtype, tuple(shape), at)


class FakeRunOptions:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.terminate = False

    def add_run_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value


@dataclass
class Captured:
    """A CUDA graph: what was bound when it was captured, and what was read in host memory."""

    binding: FakeBinding
    host: dict[str, Any]


class FakeInference:
    """An inference session that runs where its binding says."""

    def __init__(self, ort: "FakeOrt", path: str) -> None:
        self._ort = ort
        self._real = onnxruntime.InferenceSession(path, providers=[CPU])
        self.seen: dict[str, int] = {}
        self.captured: dict[str, Captured] = {}
        self.replays = 0
        self.before_run: Callable[[Any], None] = lambda options: None

    def get_inputs(self) -> Any:
        return self._real.get_inputs()

    def get_outputs(self) -> Any:
        return self._real.get_outputs()

    def get_providers(self) -> list[str]:
        return self._ort.loads

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run_with_iobinding(self, binding: FakeBinding, options: FakeRunOptions) -> None:
        self.before_run(options)
        if options.terminate:
            raise RuntimeError("terminated")
        host = {
            name: ctypes.string_at(place.address, place.nbytes)
            for name, place in binding.inputs.items()
            if place.device == "cpu"
        }
        number = options.entries["gpu_graph_id"]
        if number != "-1":
            self.seen[number] = self.seen.get(number, 0) + 1
            if number in self.captured:
                kept = self.captured[number]
                assert (binding.inputs, binding.outputs) == (
                    kept.binding.inputs,
                    kept.binding.outputs,
                ), "a captured graph ran with other addresses or shapes"
                host, self.replays = kept.host, self.replays + 1
            elif self.seen[number] > WARM_UPS:
                self.captured[number] = Captured(binding, host)
        self._ort.device.queue(lambda: self._compute(binding, host))

    def _compute(self, binding: FakeBinding, host: dict[str, bytes]) -> None:
        feeds = {}
        for name, place in binding.inputs.items():
            data: Any = host.get(name)
            if data is None:
                data = self._ort.device.bytes_at(place.address, place.nbytes, on_device=True)
            feeds[name] = np.frombuffer(data, place.dtype).reshape(place.shape).copy()
        names = list(binding.outputs)
        for name, array in zip(names, self._real.run(names, feeds), strict=True):
            place = binding.outputs[name]
            assert array.shape == place.shape
            target = self._ort.device.bytes_at(place.address, place.nbytes, on_device=True)
            target[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class FakeOrt:
    """The module: as much of it as a session needs. `loads`: the providers that can be loaded."""

    __version__ = "1.31.1"

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.loads = [CUDA, CPU]
        self.providers: Any = None
        self.sessions: list[FakeInference] = []

    RunOptions = FakeRunOptions
    SessionOptions = SimpleNamespace

    def InferenceSession(self, path: str, settings: Any, providers: Any) -> FakeInference:
        self.providers = providers
        self.sessions.append(FakeInference(self, path))
        return self.sessions[-1]


class CountingDevice(FakeDevice):
    """Counts the bytes that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        self.copied += width * rows
        super().copy_rows(target, target_pitch, source, source_pitch, width, rows)


@dataclass
class Rig:
    """A session on the stand-in, and what the same model computes without a cache."""

    bundle: Bundle
    device: CountingDevice
    ort: FakeOrt
    session: OrtCudaSession

    @property
    def inference(self) -> FakeInference:
        return self.ort.sessions[0]

    def expected(self, tokens: list[int]) -> Any:
        """Logits of the last token, [vocab], of a run of its own."""
        count = len(tokens)
        real = onnxruntime.InferenceSession(str(self.bundle.graph_path("decode")), providers=[CPU])
        cache = np.zeros((1, KV_HEADS, count, DIM), np.float32)
        feeds = {
            "input_ids": np.array([tokens]),
            "past_lens": np.zeros(1, np.int32),
            "query_lens": np.array([count], np.int32),
            "max_total_len": np.array([count], np.int32),
            "logits_indices": np.array([[count - 1]]),
            "past_key_0": cache,
            "past_value_0": cache.copy(),
        }
        return real.run(["logits"], feeds)[0][0, 0]


def batch_of(phase: Phase, rows: list[list[int]], past: list[int], first_slot: int = 0) -> Batch:
    """Right-padded; the logits of each row's last token are wanted."""
    width = max(len(row) for row in rows)
    counts = np.array([len(row) for row in rows], np.int32)
    return Batch(
        phase,
        first_slot,
        np.array([row + [0] * (width - len(row)) for row in rows], np.int64),
        np.array(past, np.int32),
        counts,
        np.array(past, np.int32) + counts,
        (counts.astype(np.int64) - 1)[:, None],
    )


MakeBatch = Callable[..., Batch]
MakeRig = Callable[..., Rig]


@pytest.fixture
def make_batch() -> MakeBatch:
    return batch_of


@pytest.fixture
def make_rig(toy_bundle: Bundle) -> MakeRig:
    def made(num_slots: int = 12, capacity: int = LENGTH) -> Rig:
        device = CountingDevice()
        ort = FakeOrt(device)
        session = open_on(ort, device, toy_bundle, SessionOptions(num_slots, capacity))
        return Rig(toy_bundle, device, ort, session)

    return made
