"""The folder of plans: complete or not there, made once, described by its record."""

import errno
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.attention_patch import BuildError, Patched
from trtllm_lite.runtime.engines.engine_builder import BuildReport, build_engines
from trtllm_lite.runtime.engines.engine_key import BuildOptions, engine_key, planned_ledger
from trtllm_lite.runtime.engines.plan_builder import BuiltPlan, PlanRequest
from trtllm_lite.runtime.engines.profiles import EngineLimits
from trtllm_lite.runtime.engines.record import parse_record
from trtllm_lite.runtime.engines.store import Machine, Need, find_engine, stored_engines
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.errors import BundleError, TrtllmLiteError, UsageError
from trtllm_lite.runtime.progress import NoProgress, Progress

NATIVE = TensorRT(object(), "tensorrt", "11.4.0.106")
OPTIONS = BuildOptions(("sm89",), EngineLimits(4, 64, 64), form="mask")
LOGITS = 4 * 32 * 128 * 4
"""Rows, logits a row, vocabulary, bytes."""


class Notes(NoProgress):
    """Keeps what is told; raises where a step begins that is named in `stop_at`."""

    def __init__(self, stop_at: str = "") -> None:
        self.notes: list[str] = []
        self.steps: list[str] = []
        self._stop_at = stop_at

    def step(self, name: str) -> None:
        self.steps.append(name)
        if self._stop_at and self._stop_at in name:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)


def plan_of(trt: TensorRT, request: PlanRequest, progress: Progress) -> BuiltPlan:
    """Stands for TensorRT: bytes that say what was asked for."""
    data = f"{request.graph.phase} {request.capacity} {request.gpus} {request.form}".encode()
    return BuiltPlan(memoryview(data), Patched(2, 2, 1), False, 100, 30, 40)


def build(
    bundle: Bundle, options: BuildOptions = OPTIONS, progress: Progress | None = None
) -> BuildReport:
    return build_engines(bundle, options, NATIVE, progress or NoProgress(), plan_of)


def folders(bundle: Bundle) -> Iterator[str]:
    return (p.name for p in (bundle.folder / "engines").iterdir() if p.is_dir())


def test_plans_are_built_described_and_found(engine_bundle: Bundle) -> None:
    report = build(engine_bundle)
    assert report.made
    machine = Machine("tensorrt", "11.4.0.106", "sm89")
    found = find_engine(engine_bundle, machine, Need(4, 128))
    assert found == report.engine
    folder = engine_bundle.folder / found.folder
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["decode.plan", "engine.json", "extend.plan", "prefill.plan"]
    assert parse_record((folder / "engine.json").read_bytes()) == found.record
    for plan in found.record.plans:
        data = (folder / plan.file.path).read_bytes()
        assert data == f"{plan.phase} 128 ('sm89',) mask".encode()
        assert (plan.file.size, plan.file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert found.plan_bytes(plan.phase) == data
        assert (plan.attention_layers, plan.lengths_set, plan.lower_right) == (2, 2, 1)
    assert list(folders(engine_bundle)) == [found.record.key.fingerprint]


def test_a_second_build_does_nothing(engine_bundle: Bundle) -> None:
    first, notes = build(engine_bundle), Notes()
    second = build(engine_bundle, progress=notes)
    assert (second.made, second.engine, notes.steps) == (False, first.engine, [])
    assert build(engine_bundle, replace(OPTIONS, force=True), notes).made
    assert notes.steps == [f"build the {phase} plan" for phase in ("prefill", "decode", "extend")]


def test_other_limits_are_other_plans_beside_the_first(engine_bundle: Bundle) -> None:
    build(engine_bundle)
    build(engine_bundle, replace(OPTIONS, limits=EngineLimits(2, 64, 64)))
    assert len(list(stored_engines(engine_bundle.folder))) == 2


def test_a_damaged_plan_is_built_again(engine_bundle: Bundle) -> None:
    report, notes = build(engine_bundle), Notes()
    path = engine_bundle.folder / report.engine.folder / "extend.plan"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = build(engine_bundle, progress=notes)
    assert again.made
    assert "building again what is damaged" in notes.notes[0]
    assert "extend.plan" in notes.notes[0]
    again.engine.check_plans()


def test_an_interrupted_build_leaves_nothing(engine_bundle: Bundle) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(engine_bundle, progress=Notes(stop_at="extend"))
    assert list(folders(engine_bundle)) == []


def test_an_interrupted_build_leaves_the_old_plans(engine_bundle: Bundle) -> None:
    first = build(engine_bundle)
    with pytest.raises(KeyboardInterrupt):
        build(engine_bundle, replace(OPTIONS, force=True), Notes(stop_at="extend"))
    assert list(stored_engines(engine_bundle.folder)) == [first.engine]
    first.engine.check_plans()
    assert list(folders(engine_bundle)) == [first.engine.record.key.fingerprint]


def test_a_full_disk_is_told_and_leaves_nothing(
    engine_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TrtllmLiteError, match=r"cannot write prefill.plan in .*: No space left"):
        build(engine_bundle)
    assert list(folders(engine_bundle)) == []


def test_what_a_killed_build_left_is_removed(engine_bundle: Bundle) -> None:
    left = engine_bundle.folder / "engines" / ".partial-1"
    left.mkdir(parents=True)
    (left / "decode.plan").write_bytes(b"half")
    build(engine_bundle)
    assert not left.exists()


def test_the_ledger_before_is_exact_and_after_is_what_was_built(engine_bundle: Bundle) -> None:
    before = planned_ledger(
        engine_bundle, engine_key(engine_bundle, OPTIONS, NATIVE), OPTIONS.limits
    )
    weights = (engine_bundle.folder / "weights.bin").stat().st_size
    assert [p.file_weights for p in before.phases] == [weights] * 3
    assert before.kv.total == 512 * 4 * 128
    assert before.activation is None
    assert before.total == 3 * weights + 512 * 4 * 128 + LOGITS
    after = build(engine_bundle).ledger
    assert (after.weights, after.activation) == (300, 40)
    assert after.total == 300 + 512 * 4 * 128 + LOGITS + 40


def test_flags_are_what_changes_the_plans(engine_bundle: Bundle) -> None:
    module = type("Module", (), {"CausalMaskKind": None})
    new, old = TensorRT(module, "tensorrt", "11.4.0.106"), replace(NATIVE, version="10.16.1.11")
    plain = replace(OPTIONS, form=None)
    exact = Bundle(engine_bundle.folder, replace(engine_bundle.manifest, dtype="float32"))
    assert engine_key(engine_bundle, plain, new).flags == ()
    assert engine_key(engine_bundle, plain, old).flags == ("attention_masks",)
    assert engine_key(exact, OPTIONS, new).flags == ("attention_masks", "no_tf32")
    with pytest.raises(UsageError, match=r"--attention lengths: TensorRT 10\.16\.1\.11 has none"):
        engine_key(engine_bundle, replace(OPTIONS, form="lengths"), old)


def test_rtx_keeps_no_timings(engine_bundle: Bundle, tmp_path: Path) -> None:
    options = replace(OPTIONS, timing_cache=tmp_path / "timings")
    with pytest.raises(UsageError, match=r"--timing-cache: TensorRT-RTX 1\.7 times no kernels"):
        engine_key(engine_bundle, options, TensorRT(object(), "tensorrt_rtx", "1.7"))


def test_a_bundle_of_another_target_is_refused(engine_bundle: Bundle) -> None:
    manifest = replace(engine_bundle.manifest, target="cpu")
    with pytest.raises(UsageError, match="exported for the target 'cpu', plans need 'tensorrt'"):
        build(Bundle(engine_bundle.folder, manifest))


def test_a_linked_folder_is_refused(engine_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (engine_bundle.folder / "engines").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="symbolic link"):
        build(engine_bundle)


def test_plans_of_rtx_are_whole(rtx: TensorRT, engine_bundle: Bundle) -> None:
    options = replace(OPTIONS, form=None)
    report = build_engines(engine_bundle, options, rtx, NoProgress())
    report.engine.check_plans()
    record = report.engine.record
    counts = [(p.attention_layers, p.lengths_set, p.lower_right) for p in record.plans]
    assert counts == [(2, 0, 0), (2, 2, 0), (2, 2, 2)]
    assert (record.key.flavour, record.key.version) == ("tensorrt_rtx", rtx.version)
    assert report.ledger.activation == max(p.activation_bytes or 0 for p in record.plans) > 0


def test_weights_that_are_gone_are_an_error(rtx: TensorRT, engine_bundle: Bundle) -> None:
    (engine_bundle.folder / "weights.bin").unlink()
    with pytest.raises(BuildError, match=r"does not parse prefill\.onnx: Failed to import"):
        build_engines(engine_bundle, replace(OPTIONS, form=None), rtx, NoProgress())
    assert list(folders(engine_bundle)) == []
