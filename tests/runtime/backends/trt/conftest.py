"""A small model in the form of the `tensorrt` target, as a bundle on disk with fake plans, and the
same model in numpy."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.fake_tensorrt import (
    FakeContext,
    FakeEngine,
    FakeTensorRT,
    fake_plan,
)
from trtllm_lite.runtime.backends.tensorrt import FoundPlans, Machinery, find_plans
from trtllm_lite.runtime.backends.trt_session import TrtSession
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.engines.profiles import EngineLimits, profiles
from trtllm_lite.runtime.engines.record import (
    RECORD_NAME,
    DimRange,
    EngineKey,
    EngineRecord,
    GraphKey,
    PlanRecord,
    Profile,
    render_record,
)
from trtllm_lite.runtime.engines.store import Need
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.manifest import (
    FileEntry,
    GraphSpec,
    KVLayer,
    KVSpec,
    Limits,
    Manifest,
    Phase,
    TensorSpec,
)
from trtllm_lite.runtime.manifest_io import write_manifest

VOCAB, HEADS, KV_HEADS, DIM, LAYERS = 29, 4, 2, 16, 2
WIDTH = HEADS * DIM
MAX_LEN = 40
CAPACITY = 56
PHASES: tuple[Phase, ...] = ("prefill", "decode", "extend")
VERSION = "10.16.1.11"

MakeManifest = Callable[..., Manifest]


@dataclass(frozen=True)
class Sizes:
    """Ranges of the profiles, least and most, and what else a rig may differ in."""

    rows: tuple[int, int] = (1, 4)
    seq: tuple[int, int] = (1, 24)
    num_logits: tuple[int, int] = (1, 24)
    max_num_seqs: int = 4
    device_bytes: int = 2**26
    masks: bool = False
    """The graphs say with masks what a query sees of the cache."""


@dataclass(frozen=True)
class Rig:
    """A bundle with fake plans, the machine that runs them, and what it remembers."""

    model: Any
    bundle: Bundle
    device: FakeDevice
    trt: FakeTensorRT
    machinery: Machinery

    def found(self, need: Need | None = None) -> FoundPlans:
        return find_plans(self.bundle, need or Need(1, 1), self.machinery)

    def session(self, num_slots: int = 4, capacity: int = CAPACITY) -> TrtSession:
        return self.found().open(SessionOptions(num_slots, capacity))

    @staticmethod
    def batch(
        phase: Phase, first_slot: int, rows: list[tuple[int, list[int]]], *, every: bool = False
    ) -> Batch:
        """Rows of (tokens in the cache, new tokens); logits of the last token or of every one."""
        width = max(len(tokens) for _, tokens in rows)
        wanted = [range(len(t)) if every else [len(t) - 1] for _, t in rows]
        return Batch(
            phase,
            first_slot,
            np.array([t + [0] * (width - len(t)) for _, t in rows], np.int64),
            np.array([past for past, _ in rows], np.int32),
            np.array([len(t) for _, t in rows], np.int32),
            np.array([past + len(t) for past, t in rows], np.int32),
            np.array([[*w, *[w[-1]] * (width * every - len(w))] for w in wanted], np.int64),
        )

    def driver(self, num_slots: int = 4, session: Any = None) -> "Driver":
        return Driver(self, session or self.session(num_slots))

    def count(self, session: TrtSession) -> list[int]:
        """How often the prefill, decode and extend plans were executed."""
        return [len(self.executions(session, phase)) for phase in PHASES]

    def executions(self, session: TrtSession, phase: Phase) -> list[dict[str, tuple[int, ...]]]:
        """The input shapes of every execution of a plan, on whatever context."""
        engine = session._plans[phase].engine
        assert isinstance(engine, FakeEngine)
        return engine.executions

    def context_of(self, session: TrtSession, phase: Phase) -> FakeContext:
        """That of the runs which are not recorded."""
        context = session._plans[phase].context
        assert isinstance(context, FakeContext)
        return context


class Driver:
    """Drives a session, and holds every logit against the model. `slots`: what each slot holds."""

    def __init__(self, rig: Rig, session: Any) -> None:
        self.rig, self.session = rig, session
        self.slots: dict[int, list[int]] = {}

    def run(self, phase: Phase, first: int, news: list[list[int]], *, every: bool = False) -> None:
        olds = [self.slots.get(first + i, []) for i in range(len(news))]
        pairs = [(len(old), new) for old, new in zip(olds, news, strict=True)]
        logits = self.session.run(self.rig.batch(phase, first, pairs, every=every))
        assert logits.shape[0] == len(news)
        for i, (old, new) in enumerate(zip(olds, news, strict=True)):
            expected = self.rig.model.reference([*old, *new])[len(old) :]
            got = logits[i, : len(new)] if every else logits[i, :1]
            assert np.abs(got - (expected if every else expected[-1:])).max() < 1e-5
            self.slots[first + i] = [*old, *new]

    def move(self, source: int, target: int) -> None:
        self.session.move(source, target, len(self.slots[source]))
        self.session.release(source)
        self.slots[target] = self.slots.pop(source)

    def swap(self, a: int, b: int) -> None:
        self.session.swap(a, b, max(len(self.slots[a]), len(self.slots[b])))
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]

    def release(self, slot: int) -> None:
        self.session.release(slot)
        self.slots.pop(slot, None)


def graph(model: Any, phase: Phase, *, masks: bool) -> onnx.ModelProto:
    """Plain operators of opset 24. Prefill attends over its own tokens, the others over all."""
    seq, wanted = ("1", "1") if phase == "decode" else ("seq", "num_logits")
    more = f"int32[batch] query_lens, int64[batch, {wanted}] logits_indices,"
    past = ", ".join(cache(i, "past") for i in range(LAYERS))
    present = ", ".join(cache(i, "present") for i in range(LAYERS))
    text = f"""<ir_version: 11, opset_import: ["" : 24]>
{phase} (int64[batch, {seq}] input_ids, int32[batch] past_lens, {"" if seq == "1" else more} {past})
    => (float[batch, {wanted}, {VOCAB}] logits, {present}) {{
    past = Cast <to = 7> (past_lens)
    shape = Shape (input_ids)
    length = Gather (shape, one)
    steps = Range (zero, length, one)
    column = Unsqueeze (past, ax1)
    wide = Add (column, steps)
    {POSITIONS if phase != "decode" else "positions = Identity (wide)"}
    lens = Add (past, length)
    embedded = Gather (embed, input_ids)
    placed = Gather (pos, positions)
    x0 = Add (embedded, placed)
    {MASK if masks and phase != "prefill" else ""}
    {"".join(layer(i, phase, masks=masks) for i in range(LAYERS))}
    {"picks = Unsqueeze (logits_indices, ax2)" if phase != "decode" else ""}
    last = {"Identity" if phase == "decode" else "GatherND <batch_dims = 1>"} (x{LAYERS}
        {"" if phase == "decode" else ", picks"})
    logits = MatMul (last, head)
}}"""
    made = onnx.parser.parse_model(text)
    constants = {**model.weights, "zero": np.array(0), "one": np.array(1), "ax1": np.array([1])}
    constants |= {
        "ax13": np.array([1, 3]),
        "ax2": np.array([2]),
        "scale": np.array(DIM**-0.5, np.float32),
    }
    constants |= {
        "q_shape": np.array([0, 0, HEADS, DIM]),
        "kv_shape": np.array([0, 0, KV_HEADS, DIM]),
        "o_shape": np.array([0, 0, WIDTH]),
    }
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in constants.items()]
    made.graph.initializer.extend(tensors)
    return made


POSITIONS = """query = Cast <to = 7> (query_lens)
    total = Add (past, query)
    end = Sub (total, one)
    ends = Unsqueeze (end, ax1)
    positions = Min (wide, ends)"""


MASK = """slot = Shape <start = 2, end = 3> (past_key_0)
    slot_length = Squeeze (slot)
    keys = Range (zero, slot_length, one)
    places = Unsqueeze (wide, ax13)
    mask = LessOrEqual (keys, places)"""


def cache(i: int, when: str) -> str:
    kind = f"float[batch, {KV_HEADS}, capacity, {DIM}]"
    return f"{kind} {when}_key_{i}, {kind} {when}_value_{i}"


def layer(i: int, phase: Phase, *, masks: bool) -> str:
    heads = "\n".join(
        f"""{p}m{i} = MatMul (x{i}, {p}{i})
        {p}r{i} = Reshape ({p}m{i}, {"q" if p == "q" else "kv"}_shape)
        {p}t{i} = Transpose <perm = [0, 2, 1, 3]> ({p}r{i})"""
        for p in "qkv"
    )
    fresh = f"qs{i}, kt{i}, vt{i}"
    cached = f"qs{i}, present_key_{i}, present_value_{i}{', mask' if masks else ', , , , lens'}"
    causal = 0 if phase == "decode" or (masks and phase == "extend") else 1
    return f"""{heads}
        qs{i} = Mul (qt{i}, scale)
        present_key_{i} = TensorScatter <axis = -2> (past_key_{i}, kt{i}, past)
        present_value_{i} = TensorScatter <axis = -2> (past_value_{i}, vt{i}, past)
        a{i} = Attention <is_causal = {causal}, scale = 1.0>
            ({fresh if phase == "prefill" else cached})
        at{i} = Transpose <perm = [0, 2, 1, 3]> (a{i})
        ar{i} = Reshape (at{i}, o_shape)
        p{i} = MatMul (ar{i}, o{i})
        x{i + 1} = Add (x{i}, p{i})
    """


def table(phase: Phase) -> GraphSpec:
    shape = ("batch", KV_HEADS, "capacity", DIM)
    seq, wanted = (1, 1) if phase == "decode" else ("seq", "num_logits")
    inputs = [
        TensorSpec("input_ids", "input_ids", "int64", ("batch", seq)),
        TensorSpec("past_lens", "past_lens", "int32", ("batch",)),
    ]
    if phase != "decode":
        inputs.append(TensorSpec("query_lens", "query_lens", "int32", ("batch",)))
        inputs.append(TensorSpec("logits_indices", "logits_indices", "int64", ("batch", wanted)))
    outputs = [TensorSpec("logits", "logits", "float32", ("batch", wanted, VOCAB))]
    for i in range(LAYERS):
        inputs.append(TensorSpec(f"past_key_{i}", "past_key", "float32", shape, i))
        inputs.append(TensorSpec(f"past_value_{i}", "past_value", "float32", shape, i))
        outputs.append(TensorSpec(f"present_key_{i}", "present_key", "float32", shape, i))
        outputs.append(TensorSpec(f"present_value_{i}", "present_value", "float32", shape, i))
    return GraphSpec(phase, f"{phase}.onnx", tuple(inputs), tuple(outputs))


def entry(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest())


def write_bundle(folder: Path, model: Any, make_manifest: MakeManifest, *, masks: bool) -> Bundle:
    """Token ids only; the model's end token is 28."""
    for phase in PHASES:
        onnx.save_model(graph(model, phase, masks=masks), folder / f"{phase}.onnx")
    (folder / "weights.bin").write_bytes(b"weights")
    (folder / "parity.json").write_text("{}")
    names = [*(f"{phase}.onnx" for phase in PHASES), "weights.bin", "parity.json"]
    manifest = make_manifest(
        "tensorrt",
        [table(phase) for phase in PHASES],
        KVSpec("float32", (KVLayer(KV_HEADS, DIM),) * LAYERS),
        Limits(8, MAX_LEN),
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        end=VOCAB - 1,
        files=[entry(folder / name) for name in names],
    )
    write_manifest(folder, manifest)
    return open_bundle(folder)


def profile(sizes: Sizes, phase: Phase) -> Profile:
    dims = {"batch": sizes.rows, "seq": sizes.seq, "num_logits": sizes.num_logits}
    names = ["batch"] if phase == "decode" else dims
    return Profile(tuple(DimRange(n, dims[n][0], dims[n][1], dims[n][1]) for n in names))


def write_plans(
    bundle: Bundle, ranges: Mapping[Phase, Profile], limits: EngineLimits, capacity: int
) -> None:
    """Fake plans of the bundle, and their record."""
    manifest = bundle.manifest
    files = {file.path: file for file in manifest.files}
    key = EngineKey(
        flavour="tensorrt",
        version=VERSION,
        gpus=("sm89",),
        driver=None,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        capacity=capacity,
        weights=files[manifest.weights],
        graphs=tuple(GraphKey(p, files[f"{p}.onnx"], (ranges[p],)) for p in PHASES),
    )
    folder = bundle.folder / "engines" / key.fingerprint
    folder.mkdir(parents=True)
    for phase in PHASES:
        path = bundle.graph_path(phase)
        data = fake_plan(manifest, path, phase, ranges[phase], capacity)
        (folder / f"{phase}.plan").write_bytes(data)
    plans = tuple(plan_record(p, entry(folder / f"{p}.plan")) for p in PHASES)
    (folder / RECORD_NAME).write_bytes(render_record(EngineRecord(key, plans, "test")))


def plan_record(phase: Phase, file: FileEntry) -> PlanRecord:
    return PlanRecord(
        phase=phase,
        file=file,
        attention_layers=LAYERS,
        lengths_set=0,
        lower_right=0,
        decomposed=0,
        weights_bytes=None,
        scratch_bytes=None,
        activation_bytes=None,
    )


def make_rig(folder: Path, sizes: Sizes, model: Any, make_manifest: MakeManifest) -> Rig:
    bundle = write_bundle(folder, model, make_manifest, masks=sizes.masks)
    limits = EngineLimits(sizes.max_num_seqs, MAX_LEN, CAPACITY - MAX_LEN)
    write_plans(bundle, {p: profile(sizes, p) for p in PHASES}, limits, CAPACITY)
    device = FakeDevice(sizes.device_bytes)
    trt = FakeTensorRT(onnxruntime, device)
    machinery = Machinery(lambda: (TensorRT(trt, "tensorrt", VERSION),), lambda: device)
    return Rig(model, bundle, device, trt, machinery)


@pytest.fixture
def make(
    tmp_path: Path, make_attention_model: Callable[..., Any], make_manifest: MakeManifest
) -> Callable[..., Rig]:
    """A rig of other sizes than the usual ones."""

    def make_one(**sizes: Any) -> Rig:
        return make_rig(tmp_path, Sizes(**sizes), make_attention_model(CAPACITY), make_manifest)

    return make_one


@pytest.fixture
def write_fake_plans() -> Callable[[Bundle, EngineLimits], None]:
    """Writes plans of the sizes that `trtllm-lite build` chooses beside any bundle for TensorRT."""

    def write(bundle: Bundle, limits: EngineLimits) -> None:
        ranges = {graph.phase: profiles(graph, limits)[0] for graph in bundle.manifest}
        write_plans(bundle, ranges, limits, limits.capacity)

    return write


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()
