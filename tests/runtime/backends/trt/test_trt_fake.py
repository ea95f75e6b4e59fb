"""The fake TensorRT refuses what the real one refuses, or would compute wrongly; what it has, the
real one has under the same name."""

import enum
import gzip
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_lite.runtime.backends.device import DeviceError
from trtllm_lite.runtime.backends.fake_tensorrt import (
    CONTEXT_BYTES,
    DataType,
    ExecutionContextAllocationStrategy,
    FakeContext,
    FakeEngine,
    FakeRuntime,
    Refused,
    TensorIOMode,
)

SHAPE = (2, 2, 56, 16)
CACHE_BYTES = int(np.prod(SHAPE)) * 4


@pytest.fixture
def engine(rig: Any) -> FakeEngine:
    """Of the decode plan."""
    found = rig.found()
    data = found.stored.plan_bytes("decode")
    made = rig.trt.Runtime(None).deserialize_cuda_engine(data)
    assert isinstance(made, FakeEngine)
    return made


class Bound:
    """A context for two rows with everything that it needs, and where it has it."""

    def __init__(self, rig: Any, engine: FakeEngine) -> None:
        self.rig, self.device, self.engine = rig, rig.device, engine
        self.context = engine.create_execution_context(
            ExecutionContextAllocationStrategy.USER_MANAGED
        )
        self.context.set_device_memory(self.device.allocate(CONTEXT_BYTES), CONTEXT_BYTES)
        self.at: dict[str, int] = {}
        for name in engine.inputs:
            is_cache = name.startswith("past_") and name != "past_lens"
            shape = SHAPE if is_cache else (2, 1) if name == "input_ids" else (2,)
            self.at[name] = self.device.allocate(CACHE_BYTES)
            self.device.fill_zero(self.at[name], CACHE_BYTES)
            self.context.set_input_shape(name, shape)
        for name in engine.outputs:
            source = engine.get_aliased_input_tensor(name)
            self.at[name] = self.at[source] if source else self.device.allocate(2 * 29 * 4)
        for name, address in self.at.items():
            self.context.set_tensor_address(name, address)

    def run(self) -> bool:
        return self.context.execute_async_v3(self.device.stream)


@pytest.fixture
def bound(rig: Any, engine: FakeEngine) -> Bound:
    return Bound(rig, engine)


def test_an_engine_tells_names_types_shapes_and_aliases_as_tensorrt_does(
    engine: FakeEngine,
) -> None:
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    assert len(names) == 11
    assert engine.get_tensor_mode("past_key_0") is TensorIOMode.INPUT
    assert engine.get_tensor_mode("logits") is TensorIOMode.OUTPUT
    assert engine.get_tensor_mode("nothing") is TensorIOMode.NONE
    assert engine.get_tensor_dtype("input_ids") is DataType.INT64
    assert engine.get_tensor_dtype("past_lens") is DataType.INT32
    assert engine.get_tensor_shape("past_key_0") == (-1, 2, 56, 16)
    assert engine.get_tensor_shape("logits") == (-1, 1, 29)
    assert engine.get_tensor_profile_shape("input_ids", 0) == [(1, 1), (4, 1), (4, 1)]
    assert engine.get_aliased_input_tensor("present_value_1") == "past_value_1"
    assert engine.get_aliased_input_tensor("logits") is None
    calls: list[Callable[[], object]] = [
        lambda: engine.get_tensor_profile_shape("input_ids", 1),
        lambda: engine.get_tensor_profile_shape("logits", 0),
        lambda: engine.get_aliased_input_tensor("past_key_0"),
        lambda: engine.get_tensor_dtype("nothing"),
        lambda: engine.is_shape_inference_io("nothing"),
        lambda: engine.create_execution_context(ExecutionContextAllocationStrategy.STATIC),
    ]
    for call in calls:
        with pytest.raises(Refused):
            call()


def test_what_is_bound_is_computed_when_the_stream_gets_there(bound: Bound, rig: Any) -> None:
    assert bound.run()
    logits = bound.device.bytes_at(bound.at["logits"], 2 * 29 * 4).view(np.float32)
    assert np.isnan(logits).all()
    bound.device.synchronize()
    assert np.abs(logits.reshape(2, 29) - rig.model.reference([0])[0]).max() < 1e-5
    cache = bound.device.bytes_at(bound.at["past_key_0"], CACHE_BYTES).view(np.float32)
    assert (cache.reshape(SHAPE).any(axis=(1, 3)) == (np.arange(56) == 0)).all()
    assert bound.context.executions[0]["input_ids"] == (2, 1)


def test_shapes_outside_of_the_profile_are_refused(bound: Bound) -> None:
    wrong = [
        ("input_ids", (5, 1)),
        ("input_ids", (2, 2)),
        ("input_ids", (2,)),
        ("past_key_0", (2, 2, 57, 16)),
        ("past_key_0", (2, 2, 55, 16)),
        ("logits", (2, 1, 29)),
        ("nothing", (1,)),
    ]
    for name, shape in wrong:
        with pytest.raises(Refused):
            bound.context.set_input_shape(name, shape)


def test_addresses_that_are_not_aligned_or_not_there_are_refused(
    bound: Bound, engine: FakeEngine
) -> None:
    with pytest.raises(Refused, match="not a multiple of 256"):
        bound.context.set_tensor_address("input_ids", bound.at["input_ids"] + 8)
    with pytest.raises(Refused, match="no tensor"):
        bound.context.set_tensor_address("nothing", 256)
    fresh = FakeContext(engine)
    with pytest.raises(Refused, match="too little memory"):
        fresh.execute_async_v3(bound.device.stream)
    memory = bound.device.allocate(CONTEXT_BYTES)
    fresh.set_device_memory(memory, CONTEXT_BYTES - 1)
    with pytest.raises(Refused, match="too little memory"):
        fresh.execute_async_v3(bound.device.stream)
    fresh.set_device_memory(memory, CONTEXT_BYTES)
    with pytest.raises(Refused, match="'input_ids' has no shape"):
        fresh.execute_async_v3(bound.device.stream)
    for name in engine.inputs:
        fresh.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[0])
    with pytest.raises(Refused, match="'input_ids' has no address"):
        fresh.execute_async_v3(bound.device.stream)
    with pytest.raises(DeviceError):
        fresh.set_device_memory(memory, CONTEXT_BYTES + 1)


def test_a_cache_that_is_not_updated_in_place_is_refused(bound: Bound) -> None:
    bound.context.set_tensor_address("present_key_1", bound.at["past_key_0"])
    with pytest.raises(Refused, match="'present_key_1' does not have the address of 'past_key_1'"):
        bound.run()


def test_another_stream_is_refused(bound: Bound) -> None:
    with pytest.raises(Refused, match="stream"):
        bound.context.execute_async_v3(0)


def test_memory_beyond_an_allocation_is_refused(bound: Bound) -> None:
    bound.context.set_tensor_address("logits", bound.device.allocate(2 * 29 * 4 - 1))
    bound.run()
    with pytest.raises(DeviceError, match="no device memory"):
        bound.device.synchronize()


def test_the_memory_of_a_context_is_overwritten_by_every_run(rig: Any, engine: FakeEngine) -> None:
    bound = Bound(rig, engine)
    memory = bound.device.allocate(CONTEXT_BYTES)
    bound.context.set_device_memory(memory, CONTEXT_BYTES)
    bound.device.fill_zero(memory, CONTEXT_BYTES)
    bound.run()
    bound.device.synchronize()
    assert bound.device.bytes_at(memory, CONTEXT_BYTES).all()


def test_only_what_was_run_before_can_be_recorded(bound: Bound) -> None:
    with pytest.raises(Refused, match="not run before"):
        bound.device.record(bound.run)
    bound.run()
    recorded = bound.device.record(bound.run)
    recorded.launch()
    bound.device.synchronize()
    assert [x["past_lens"] for x in bound.context.executions] == [(2,), (2,)]
    bound.context.set_input_shape("past_lens", (3,))
    bound.context.set_input_shape("past_lens", (2,))
    with pytest.raises(Refused, match="not run before"):
        bound.device.record(bound.run)


def test_what_was_recorded_depends_on_its_context(bound: Bound) -> None:
    """On a GPU it would compute something, right or wrong."""
    bound.run()
    recorded = bound.device.record(bound.run)
    bound.context.set_tensor_address("logits", bound.at["logits"])
    recorded.launch()
    with pytest.raises(DeviceError, match="whose context was changed since"):
        bound.device.synchronize()


def test_only_the_first_context_of_an_engine_has_a_profile(bound: Bound) -> None:
    second = Bound(bound.rig, bound.engine)
    with pytest.raises(Refused, match="no optimization profile"):
        second.run()
    with pytest.raises(Refused, match="profile 1"):
        second.context.set_optimization_profile_async(1, second.device.stream)
    assert second.context.set_optimization_profile_async(0, second.device.stream)
    with pytest.raises(Refused, match="has no shape"):
        second.run()
    with pytest.raises(Refused, match="memory that the context does not have yet"):
        FakeContext(bound.engine).set_optimization_profile_async(0, second.device.stream)


def test_a_plan_that_is_none_is_not_loaded_and_the_log_says_so(rig: Any) -> None:
    logged: list[str] = []

    class Logger:
        def log(self, severity: Any, text: str) -> None:
            logged.append(f"{severity.name}: {text}")

    assert rig.trt.Runtime(Logger()).deserialize_cuda_engine(b"\x00ftrt") is None
    assert logged == ["ERROR: the plan is not one of this TensorRT"]


@pytest.mark.parametrize("version", ["10.16.1", "11.4.0", "rtx-1.7.1"])
def test_everything_that_the_backend_can_call_is_in_the_real_one(version: str) -> None:
    """The backend runs on the fake, so it calls nothing that the fake has not."""
    path = Path(__file__).parents[2] / "engines" / "tensorrt_names.json.gz"
    recorded: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))[version]
    fakes = {"ICudaEngine": FakeEngine, "IExecutionContext": FakeContext, "Runtime": FakeRuntime}
    for real, fake in fakes.items():
        names = {name for name, _ in inspect.getmembers(fake) if not name.startswith("_")}
        assert names <= set(recorded[real])
    kinds: list[type[enum.Enum]] = [TensorIOMode, DataType, ExecutionContextAllocationStrategy]
    for kind in kinds:
        members = {member.name: member.value for member in kind}
        assert members.items() <= recorded[kind.__name__]["enum"].items()
    assert {"ILogger", "Runtime"} <= recorded.keys()
