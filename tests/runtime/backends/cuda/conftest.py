"""A toy bundle of target "cuda", and a stand-in for ONNX Runtime's CUDA provider."""

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from trtllm_lite.exporter.cuda_placement.stubs import missing_tools
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.fake_ort import BoundInference, FakeBinding, FakeRunOptions
from trtllm_lite.runtime.backends.ort_cuda import open_on
from trtllm_lite.runtime.backends.ort_cuda_session import OrtCudaSession
from trtllm_lite.runtime.backends.ort_providers import CPU, CUDA
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.manifest import (
    FileEntry,
    GraphSpec,
    KVLayer,
    KVSpec,
    Limits,
    Phase,
    TensorSpec,
)

VOCAB, HEADS, KV_HEADS, DIM, LENGTH, BEST = 40, 2, 1, 16, 96, 4
WIDTH = HEADS * DIM
CACHE = f"float[batch, {KV_HEADS}, capacity, {DIM}]"
PHASES: tuple[Phase, ...] = ("prefill", "decode")


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
def toy_bundle(tmp_path: Path, make_manifest: Callable[..., Any]) -> Bundle:
    data = toy_graph().SerializeToString()
    files = []
    for phase in PHASES:
        (tmp_path / f"{phase}.onnx").write_bytes(data)
        files.append(FileEntry(f"{phase}.onnx", len(data), hashlib.sha256(data).hexdigest()))
    manifest = make_manifest(
        "cuda",
        [toy_table(phase) for phase in PHASES],
        KVSpec("float32", (KVLayer(KV_HEADS, DIM),)),
        Limits(16, LENGTH),
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        files=files,
    )
    return Bundle(tmp_path, manifest)


@dataclass
class Captured:
    """A CUDA graph: what was bound when it was captured, and what was read in host memory.
    `whole`: the run that was captured did not fail, of which nothing tells later."""

    binding: FakeBinding
    host: dict[str, Any]
    whole: bool


class FakeInference(BoundInference):
    """An inference session that captures CUDA graphs."""

    def __init__(self, ort: "FakeOrt", path: str) -> None:
        super().__init__(onnxruntime, ort.device, path)
        self._ort = ort
        self.captured: dict[str, Captured] = {}
        self.replays = 0
        self.while_capturing: Callable[[], None] = lambda: None

    def get_providers(self) -> list[str]:
        return self._ort.loads

    def run_with_iobinding(self, binding: FakeBinding, options: FakeRunOptions) -> None:
        self.before_run(options)
        if options.terminate:
            raise RuntimeError("terminated")
        host = binding.in_host_memory()
        number = options.entries["gpu_graph_id"]
        if number in self.captured:
            kept, self.replays = self.captured[number], self.replays + 1
            assert (binding.inputs, binding.outputs) == (
                kept.binding.inputs,
                kept.binding.outputs,
            ), "a captured graph ran with other addresses or shapes"
            if not kept.whole:
                return
            host = kept.host
        elif number != "-1":
            self._capture(number, binding, host)
        self.queue(binding, host)

    def _capture(self, number: str, binding: FakeBinding, host: dict[str, bytes]) -> None:
        """In the first call already, behind two runs that are not captured."""
        self.captured[number] = Captured(binding, host, whole=False)
        self.while_capturing()
        self.captured[number].whole = True


class FakeSessionOptions(SimpleNamespace):
    def add_session_config_entry(self, name: str, value: str) -> None:
        setattr(self, name, value)


class FakeOrt:
    """The module: as much of it as a session needs. `loads`: the providers that can be loaded."""

    __version__ = "1.31.1"

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.loads = [CUDA, CPU]
        self.providers: Any = None
        self.sessions: list[FakeInference] = []

    RunOptions = FakeRunOptions
    SessionOptions = FakeSessionOptions

    def InferenceSession(
        self, path: str, settings: Any, providers: Any, enable_fallback: int
    ) -> FakeInference:
        assert not enable_fallback, "what fails would go on without the provider"
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


@pytest.fixture
def real_gpu_package() -> Path:
    """Where the libraries of onnxruntime-gpu lie; skips without it, and without what compiles stub
    libraries for it."""
    try:
        importlib.metadata.version("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("onnxruntime-gpu is not installed")
    if missing := missing_tools():
        pytest.skip(f"not installed: {', '.join(missing)}")
    return Path(onnxruntime.__file__).parent / "capi"


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
