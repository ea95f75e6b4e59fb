"""doctor's checks on the session over fake plans: they pass, and find a graph that TensorRT reads
as something else than it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from trtllm_lite.runtime.backends.base import KVBlock, Session
from trtllm_lite.runtime.backends.trt_contexts import PlanContext
from trtllm_lite.tools.doctor_checks.bench import Check, Facts
from trtllm_lite.tools.doctor_checks.drive import Logits
from trtllm_lite.tools.doctor_checks.jobs import CORRECTNESS
from trtllm_lite.tools.doctor_checks.logits_checks import BehindTheLength, OneRow, PiecesOverCache
from trtllm_lite.tools.doctor_checks.memory_checks import InPlace
from trtllm_lite.tools.doctor_checks.result import CheckResult, judged

SLOTS, CAPACITY = 6, 56
LENGTHS_INPUT = 6
"""`nonpad_kv_seqlen` of the operator Attention."""


@dataclass(frozen=True)
class Reference:
    """The model in numpy; its K and V from the prefill graph, run by itself."""

    rig: Any

    def logits(self, row: Sequence[int]) -> Logits:
        found: Logits = self.rig.model.reference(list(row)).astype(np.float32)
        return found

    def keys_values(self, row: Sequence[int]) -> KVBlock:
        graph = onnxruntime.InferenceSession(self.rig.bundle.graph_path("prefill"))
        cache = {
            x.name: np.zeros((1, x.shape[1], 64, x.shape[3]), np.float32)
            for x in graph.get_inputs()
            if x.name.startswith("past_key") or x.name.startswith("past_value")
        }
        given = {
            "input_ids": np.array([row], np.int64),
            "past_lens": np.zeros(1, np.int32),
            "query_lens": np.array([len(row)], np.int32),
            "logits_indices": np.zeros((1, 1), np.int64),
        }
        names = [f"present_{kind}_{i}" for kind in ("key", "value") for i in range(len(cache) // 2)]
        blocks = [a[0, :, : len(row)] for a in graph.run(names, {**given, **cache})]
        half = len(blocks) // 2
        return KVBlock(tuple(blocks[:half]), tuple(blocks[half:]))


@dataclass(frozen=True)
class Bench:
    rig: Any
    subject: Session

    @property
    def facts(self) -> Facts:
        vocab = self.rig.bundle.manifest.model.vocab_size
        return Facts("fake", vocab, SLOTS, CAPACITY, "float32", weight_bytes=1, kv_bytes=1)

    @property
    def reference(self) -> Reference:
        return Reference(self.rig)


@pytest.fixture
def many(make: Any) -> Any:
    """A rig with slots for every check."""
    return make(max_num_seqs=SLOTS, rows=(1, SLOTS))


def result_of(check: Check, rig: Any) -> CheckResult:
    session = rig.session(SLOTS)
    try:
        return judged(check.name, "fake", lambda: check.run(Bench(rig, session)))
    finally:
        session.close()


def rewrite(path: Path, **changes: Any) -> None:
    """The graph with its attentions changed: `lengths` False takes their lengths away, `causal`
    sets their attribute."""
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "Attention" and len(node.input) > LENGTHS_INPUT:
            if not changes.get("lengths", True):
                del node.input[3:]
            for attribute in node.attribute:
                if attribute.name == "is_causal" and "causal" in changes:
                    attribute.i = changes["causal"]
    onnx.save_model(model, path)


@pytest.mark.parametrize("check", CORRECTNESS, ids=lambda c: c.name)
def test_the_session_passes(many: Any, check: Check) -> None:
    result = result_of(check, many)
    assert (result.status, result.reason, result.notes) == ("passed", "", ())


@pytest.mark.parametrize(
    ("phase", "check"),
    [
        ("decode", OneRow()),
        ("decode", BehindTheLength()),
        ("extend", PiecesOverCache()),
        ("extend", BehindTheLength()),
    ],
)
def test_dropped_lengths_are_found(many: Any, phase: Any, check: Check) -> None:
    """What TensorRT does with such a graph when nobody sets its lengths again."""
    rewrite(many.bundle.graph_path(phase), lengths=False)
    result = result_of(check, many)
    assert result.status == "failed"
    assert "_distance is" in result.reason


def test_a_piece_that_sees_its_own_future_is_found(many: Any) -> None:
    rewrite(many.bundle.graph_path("extend"), causal=0)
    result = result_of(PiecesOverCache(), many)
    assert "first_token_distance is" in result.reason


def test_a_cache_in_another_place_is_found(many: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode runs that are bound to the slots behind theirs."""
    bind = PlanContext._bind_cache

    def elsewhere(self: PlanContext, first_slot: int, rows: int) -> None:
        shift = self._io.phase == "decode" and first_slot + rows < SLOTS
        bind(self, first_slot + shift, rows)

    monkeypatch.setattr(PlanContext, "_bind_cache", elsewhere)
    assert result_of(InPlace(), many).status == "failed"
