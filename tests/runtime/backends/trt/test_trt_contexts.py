"""Which contexts runs get, so that nothing changes one that a recorded run depends on."""

import enum
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.backends import fake_tensorrt
from trtllm_lite.runtime.backends.fake_tensorrt import (
    ExecutionContextAllocationStrategy,
    FakeContext,
    FakeEngine,
    Refused,
)

NAMES = Path(__file__).parents[2] / "engines" / "tensorrt_names.json.gz"


class GraphStrategy(enum.Enum):
    """TensorRT-RTX's CudaGraphStrategy."""

    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class RuntimeConfig:
    """TensorRT-RTX's IRuntimeConfig."""

    def __init__(self) -> None:
        self.cuda_graph_strategy = GraphStrategy.DISABLED
        self.allocation = ExecutionContextAllocationStrategy.STATIC

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> None:
        self.allocation = strategy


class RtxContext(FakeContext):
    """Its kernels change after a while, so nobody else may capture them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.strategy = GraphStrategy.DISABLED
        self.changes_at_runs: list[int] = []

    def execute_async_v3(self, stream: int) -> bool:
        if self._device.is_recording:
            raise Refused("the kernels that are recorded are not the ones to stay")
        self.changes_at_runs.append(self._changes)
        return super().execute_async_v3(stream)


class RtxEngine(FakeEngine):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.contexts: list[RtxContext] = []

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, how: Any) -> FakeContext:
        config = how if isinstance(how, RuntimeConfig) else None
        made = super().create_execution_context(how if config is None else config.allocation)
        assert isinstance(made, RtxContext)
        if config is not None:
            made.strategy = config.cuda_graph_strategy
        self.contexts.append(made)
        return made


@pytest.fixture
def rtx(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rig of TensorRT-RTX."""
    monkeypatch.setattr(fake_tensorrt, "FakeContext", RtxContext)
    monkeypatch.setattr(fake_tensorrt, "FakeEngine", RtxEngine)
    monkeypatch.setattr(rig.trt, "CudaGraphStrategy", GraphStrategy, raising=False)
    return rig


def decode_in_turns(driver: Any) -> None:
    """Runs of one and of two rows, and some from another slot on."""
    driver.run("prefill", 0, [[1, 2, 3], [4, 5]])
    for step in range(3):
        driver.run("decode", 0, [[step], [step + 1]])
        driver.run("decode", 0, [[step]])
        driver.run("decode", 1, [[step]])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_each_recorded_run_keeps_a_context_of_its_own(
    rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decode_in_turns(rig.driver())
    assert [x.launches for x in rig.device.recorded] == [2, 2]
    assert warnings(caplog) == []


def test_recorded_contexts_share_the_memory_of_the_others(rig: Any) -> None:
    driver = rig.driver()
    before = rig.device.addresses
    decode_in_turns(driver)
    assert rig.device.addresses == before


@pytest.mark.parametrize("refused", ["create_execution_context", "context"])
def test_where_there_is_no_further_context_decoding_goes_on_with_the_first(
    rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    driver = rig.driver()
    if refused == "context":
        first = rig.context_of(driver.session, "decode")
        runs = FakeContext.execute_async_v3
        monkeypatch.setattr(
            FakeContext, "execute_async_v3", lambda self, s: self is first and runs(self, s)
        )
        monkeypatch.setattr(
            rig.context_of(driver.session, "prefill"),
            "execute_async_v3",
            runs.__get__(rig.context_of(driver.session, "prefill")),
        )
    else:
        monkeypatch.setattr(FakeEngine, refused, lambda self, strategy: None)
    decode_in_turns(driver)
    assert rig.device.recorded == []
    (said,) = warnings(caplog)
    assert said.startswith("decode runs without CUDA graphs: ")


def test_rtx_captures_by_itself_what_is_left_as_it_is(
    rtx: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = rtx.driver()
    decode_in_turns(driver)
    contexts = driver.session._plans["decode"].engine.contexts
    off, on = GraphStrategy.DISABLED, GraphStrategy.WHOLE_GRAPH_CAPTURE
    assert [x.strategy for x in contexts] == [off, on, on]
    for context in contexts[1:]:
        # Each change would have it capture again.
        assert len(context.changes_at_runs) == 3
        assert len(set(context.changes_at_runs)) == 1
    assert rtx.device.recorded == []
    assert warnings(caplog) == []


def test_the_names_of_rtx_are_those_that_it_has() -> None:
    recorded: dict[str, Any] = json.loads(gzip.decompress(NAMES.read_bytes()))["rtx-1.7.1"]
    config = {n for n in (*vars(RuntimeConfig), *vars(RuntimeConfig())) if not n.startswith("_")}
    assert config - {"allocation"} <= set(recorded["IRuntimeConfig"])
    assert "create_runtime_config" in recorded["ICudaEngine"]
    members = recorded["CudaGraphStrategy"]["enum"]
    assert {x.name: x.value for x in GraphStrategy}.items() <= members.items()
    for version in ("10.16.1", "11.4.0"):
        other = json.loads(gzip.decompress(NAMES.read_bytes()))[version]
        assert "CudaGraphStrategy" not in other
