"""Plans are loaded only from a record that fits, and run only if they keep the contract."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.backends import device_pool
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.choice import choose_plans
from trtllm_lite.runtime.backends.device import DeviceError
from trtllm_lite.runtime.backends.fake_tensorrt import DataType, FakeEngine, FakeRuntime
from trtllm_lite.runtime.backends.tensorrt import Machinery, find_plans
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.record import parse_record
from trtllm_lite.runtime.engines.store import Need
from trtllm_lite.runtime.engines.trt_module import NoTensorRTError
from trtllm_lite.runtime.errors import BundleError, UsageError

ANY = Need(1, 1)
Patch = pytest.MonkeyPatch


def plan_file(rig: Any, phase: str) -> Path:
    (path,) = rig.bundle.folder.glob(f"engines/*/{phase}.plan")
    assert isinstance(path, Path)
    return path


def test_a_plan_that_was_changed_is_not_loaded(rig: Any) -> None:
    path = plan_file(rig, "extend")
    path.write_bytes(path.read_bytes().replace(b"extend", b"EXTEND"))
    with pytest.raises(BundleError, match=r"changed or damaged.*trtllm-lite build"):
        rig.session()
    assert rig.device.addresses == ()


def test_a_plan_that_tensorrt_does_not_take_is_told_with_its_words(
    rig: Any, monkeypatch: Patch
) -> None:
    load = FakeRuntime.deserialize_cuda_engine
    monkeypatch.setattr(
        FakeRuntime, "deserialize_cuda_engine", lambda self, data: load(self, b"{" + data)
    )
    with pytest.raises(
        BundleError, match=r"does not load it.*the plan is not one of this TensorRT"
    ):
        rig.session()
    assert rig.device.addresses == ()


def not_aliased(engine: FakeEngine, name: str) -> str | None:
    return None


def crossed(engine: FakeEngine, name: str) -> str | None:
    return {"present_key_0": "past_key_1", "present_key_1": "past_key_0"}.get(
        name, engine.aliases.get(name)
    )


@pytest.mark.parametrize(
    ("method", "instead", "message"),
    [
        ("get_aliased_input_tensor", not_aliased, "'present_key_0' is written over nothing, not"),
        ("get_aliased_input_tensor", crossed, "written over 'past_key_1', not in place"),
        ("is_shape_inference_io", lambda e, n: n == "past_lens", "'past_lens' is read on the host"),
        ("get_tensor_dtype", lambda e, n: DataType.HALF, "'input_ids' is float16 in the graph"),
        ("get_tensor_dtype", lambda e, n: DataType.INT8, "is int8 in the graph"),
        ("get_tensor_shape", lambda e, n: (-1, 2, 57, 16), "in the graph.*in bundle.json"),
        ("create_execution_context", lambda e, s: None, "no execution context"),
    ],
)
def test_a_plan_outside_of_the_contract_is_refused(
    rig: Any, monkeypatch: Patch, method: str, instead: Callable[..., Any], message: str
) -> None:
    monkeypatch.setattr(FakeEngine, method, instead)
    with pytest.raises(BundleError, match=message):
        rig.session()
    assert rig.device.addresses == ()


def test_a_plan_of_another_capacity_than_its_record_says_is_refused(rig: Any) -> None:
    found = rig.found()
    record = found.stored.record
    wrong = replace(record, key=replace(record.key, capacity=48))
    with pytest.raises(BundleError, match=r"'past_key_0' is \[None, 2, 56, 16\].*48, 16\]"):
        replace(found, stored=replace(found.stored, record=wrong)).open(SessionOptions(1, 40))


def test_limits_beyond_those_of_the_plans_are_refused_with_both_numbers(rig: Any) -> None:
    with pytest.raises(UsageError, match=r"max_num_seqs: got 5; .* at most 4"):
        rig.session(num_slots=5)
    with pytest.raises(UsageError, match="got 57; the plans have slots of 56 tokens"):
        rig.session(capacity=57)


def test_slots_that_would_begin_at_odd_places_are_refused(make: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(device_pool, "ALIGNMENT", 4096)
    with pytest.raises(UsageError, match="slots of 56 tokens, 7168 bytes a layer"):
        make().session()


def test_memory_to_work_in_that_is_not_there_is_refused(make: Any, monkeypatch: Patch) -> None:
    with pytest.raises(UsageError, match="need 0 MiB to work in"):
        make(device_bytes=4000).session()


def foreign(rig: Any, **changes: Any) -> Bundle:
    """The bundle of a rig whose plans were built with another key."""
    (path,) = rig.bundle.folder.glob("engines/*/engine.json")
    document = json.loads(path.read_text())
    document["key"] |= changes
    record = parse_record(json.dumps(document).encode())
    folder = path.parent.with_name(record.key.fingerprint)
    path.write_text(json.dumps(document))
    path.parent.rename(folder)
    return rig.bundle  # type: ignore[no-any-return]  # of a fixture


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"version": "10.15.0"}, "built by tensorrt 10.15.0, this machine has 10.16.1.11"),
        ({"flavour": "tensorrt_rtx"}, "built by tensorrt_rtx"),
        ({"gpus": ["sm86"]}, "built for sm86, this GPU is sm89"),
    ],
)
def test_plans_of_another_machine_are_left_alone(
    rig: Any, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], cause: str
) -> None:
    bundle = foreign(rig, **changes)
    with pytest.raises(BundleError, match=f"{cause}.*trtllm-lite build"):
        choose_plans(bundle, "tensorrt", ANY, rig.machinery)
    with caplog.at_level(logging.WARNING):
        assert choose_plans(bundle, "auto", ANY, rig.machinery) is None
    (warning,) = caplog.records
    assert "running on the CPU" in warning.getMessage()
    assert cause in warning.getMessage()


def test_without_tensorrt_or_a_gpu_the_reason_is_told(
    rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def no_gpu() -> Any:
        raise DeviceError("CUDA: no CUDA-capable device is detected")

    without = Machinery(lambda: (), rig.machinery.open_device)
    blind = Machinery(rig.machinery.installed, no_gpu)
    with pytest.raises(NoTensorRTError, match="no TensorRT is installed"):
        find_plans(rig.bundle, ANY, without)
    with pytest.raises(DeviceError, match="no CUDA-capable"):
        choose_plans(rig.bundle, "tensorrt", ANY, blind)
    with caplog.at_level(logging.WARNING):
        assert choose_plans(rig.bundle, "auto", ANY, without) is None
        assert choose_plans(rig.bundle, "auto", ANY, blind) is None
    assert len(caplog.records) == 2


def test_a_backend_is_chosen_by_name_or_by_target(rig: Any) -> None:
    found = choose_plans(rig.bundle, "auto", ANY, rig.machinery)
    assert found is not None
    assert found.trt.version == "10.16.1.11"
    assert choose_plans(rig.bundle, "onnxruntime", ANY, rig.machinery) is None
    cpu = replace(rig.bundle, manifest=replace(rig.bundle.manifest, target="cpu"))
    assert choose_plans(cpu, "auto", ANY, rig.machinery) is None
    with pytest.raises(UsageError, match=r"target is cpu.*--target tensorrt"):
        choose_plans(cpu, "tensorrt", ANY, rig.machinery)
    wrong: Any = "vulkan"
    with pytest.raises(UsageError, match="backend: got 'vulkan'; allowed: auto, onnx"):
        choose_plans(rig.bundle, wrong, ANY, rig.machinery)
    with pytest.raises(BundleError, match="'cpu'; TensorRT runs 'tensorrt'"):
        find_plans(cpu, ANY, rig.machinery)
    two = replace(rig.bundle.manifest, graphs=rig.bundle.manifest.graphs[:2])
    with pytest.raises(BundleError, match="needs one of phase extend"):
        find_plans(replace(rig.bundle, manifest=two), ANY, rig.machinery)


def test_the_first_tensorrt_that_has_plans_is_taken(rig: Any) -> None:
    ours = rig.machinery.installed()[0]
    other = replace(ours, flavour="tensorrt_rtx", version="1.7.1")
    both = Machinery(lambda: (other, ours), rig.machinery.open_device)
    assert find_plans(rig.bundle, ANY, both).trt is ours
    with pytest.raises(BundleError, match="built by tensorrt, this machine has tensorrt_rtx"):
        find_plans(rig.bundle, ANY, Machinery(lambda: (other,), rig.machinery.open_device))
