"""TensorRT through ONNX Runtime's providers, on a stand-in that refuses what they refuse: every
logit against the float64 model, what is asked of the providers, and which bundles are refused."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime
import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.backends import ort_tensorrt
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.choice import choose_provider
from trtllm_lite.runtime.backends.fake_ort import FakeEngineOrt
from trtllm_lite.runtime.backends.ort_engine_cache import EngineCache
from trtllm_lite.runtime.backends.ort_providers import CPU, CUDA, RTX, RTX_MODULE, TENSORRT
from trtllm_lite.runtime.backends.ort_tensorrt import (
    FoundProvider,
    OrtMachinery,
    find_engine_provider,
)
from trtllm_lite.runtime.backends.ort_tensorrt_session import OrtTensorrtSession
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import (
    BundleError,
    EngineDeadError,
    RunInterruptedError,
    StepError,
    UsageError,
)
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.sampling_params import SamplingParams

CHUNK, CAPACITY, SLOTS = 16, 56, 4
Make = Callable[..., Any]


@dataclass
class Setup:
    """A bundle in mask form, the machine, and the session on one of the providers."""

    rig: Any
    ort: FakeEngineOrt
    choice: Any

    def found(self) -> FoundProvider:
        machinery = OrtMachinery(lambda: self.ort, lambda: self.rig.device)
        return find_engine_provider(self.rig.bundle, self.choice, CHUNK, machinery)

    def session(self) -> OrtTensorrtSession:
        return self.found().open(SessionOptions(SLOTS, CAPACITY))


class Plugin(ModuleType):
    """The package onnxruntime_ep_nv_tensorrt_rtx."""

    __version__ = "0.5.0"

    @staticmethod
    def get_ep_name() -> str:
        return RTX

    @staticmethod
    def get_library_path() -> str:
        return "/plugin.so"


@pytest.fixture(params=["tensorrt", "nv-tensorrt-rtx"])
def setup(request: pytest.FixtureRequest, make: Make, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setitem(sys.modules, RTX_MODULE, Plugin(RTX_MODULE))
    rig = make(masks=True)
    return Setup(rig, FakeEngineOrt(onnxruntime, rig.device), request.param)


def counts(setup: Setup) -> dict[str, int]:
    """Runs of each graph."""
    return {Path(x.path).stem: len(x.runs) for x in setup.ort.sessions}


def test_prompts_chunks_and_steps_are_those_of_the_model(setup: Setup) -> None:
    session = setup.session()
    it = setup.rig.driver(session=session)
    it.run("prefill", 0, [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]])
    for token in (7, 1, 20):
        it.run("decode", 0, [[token], [token + 1], [token + 2]])
    it.run("prefill", 1, [[1, 2, 3], [4, 5]])
    it.run("decode", 0, [[1, 2], [3]], every=True)
    it.move(2, 3)
    it.swap(0, 3)
    it.run("decode", 0, [[8], [9]])
    it.run("prefill", 2, [[1] * 17])  # the most that the profile takes
    assert counts(setup) == {"prefill": 2, "decode": 4, "extend": 2}
    assert session.info.kernels == "tensorrt"
    assert session.info.multi_token_decode
    session.close()
    assert setup.rig.device.addresses == ()


def test_what_the_provider_is_told(setup: Setup) -> None:
    """Profiles for every input with the slot's length in them, our stream, a folder of its own."""
    setup.session()
    decode = next(x for x in setup.ort.sessions if Path(x.path).stem == "decode")
    assert decode.ranges[0]["input_ids"] == (1, 1)
    assert decode.ranges[2]["input_ids"] == (4, 1)
    assert decode.ranges[0]["past_key_0"] == (1, 2, 64, 16)
    assert decode.ranges[2]["past_key_0"] == (4, 2, 64, 16)
    extend = next(x for x in setup.ort.sessions if Path(x.path).stem == "extend")
    assert extend.ranges[2]["input_ids"] == (4, 17)
    rtx = setup.choice != "tensorrt"
    assert {x.provider for x in setup.ort.sessions} == {RTX if rtx else TENSORRT}
    assert setup.ort.registered == ({RTX: "/plugin.so"} if rtx else {})


def test_a_second_session_of_the_process_finds_the_provider_there(setup: Setup) -> None:
    for _ in range(2):
        setup.session().close()
    assert len(setup.ort.registered) <= 1


def test_engines_are_kept_for_the_next_time(setup: Setup) -> None:
    setup.session().close()
    setup.session().close()
    assert [x.built for x in setup.ort.sessions] == [True] * 3 + [False] * 3
    (kept, *_) = sorted((setup.rig.bundle.folder / "engines").glob("onnxruntime-*/*.engine"))
    assert kept.parent.stat().st_mode & 0o777 == 0o700


def test_an_engine_that_was_changed_or_put_there_is_removed_and_built_again(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.session().close()
    (kept, other, _) = sorted((setup.rig.bundle.folder / "engines").glob("onnxruntime-*/*.engine"))
    kept.write_bytes(b"code")
    stranger = other.with_name("stranger.engine")
    stranger.symlink_to(other)
    setup.session().close()
    assert [x.built for x in setup.ort.sessions[3:]].count(True) == 1
    assert not stranger.exists()
    assert kept.read_bytes() != b"code"
    assert sum("is removed and built again" in r.getMessage() for r in caplog.records) == 2


def test_a_folder_that_others_can_write_to_is_not_used(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    cache = EngineCache(setup.rig.bundle, "decode", ["x"])
    assert cache.folder is not None
    cache.folder.chmod(0o770)
    assert EngineCache(setup.rig.bundle, "decode", ["x"]).folder is None
    assert "only its owner, this user, can write to" in caplog.text
    made: list[tuple[Phase, list[str]]] = [("decode", ["y"]), ("decode", ["z"]), ("extend", ["y"])]
    names = {EngineCache(setup.rig.bundle, phase, settings).folder for phase, settings in made}
    assert len(names) == 3
    no_folder = Bundle(setup.rig.bundle.folder / "weights.bin", setup.rig.bundle.manifest)
    without = EngineCache(no_folder, "decode", ["x"])
    assert without.folder is None
    without.seal()


def test_a_node_that_lands_elsewhere_is_refused(setup: Setup) -> None:
    setup.ort.stray = True
    with pytest.raises(UsageError, match=f"not taken the whole .* graph .{CPU}: Softmax"):
        setup.session()
    assert setup.rig.device.addresses == ()


def test_a_graph_that_cannot_be_loaded_says_why(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **more: Any) -> None:
        raise RuntimeError("no\nTensorRT")

    monkeypatch.setattr(setup.ort, "InferenceSession", broken)
    with pytest.raises(BundleError, match=r"onnx: .*Provider cannot load it: no TensorRT"):
        setup.session()
    assert setup.rig.device.addresses == ()


def test_the_real_module_has_what_is_asked_of_it(make: Make) -> None:
    """On the CPU provider: a free dimension is fixed, and it is told where nodes land."""
    rig, ort = make(masks=True), onnxruntime
    for name in ("register_execution_provider_library", "get_ep_devices"):
        assert callable(getattr(ort, name))
    given = ort.SessionOptions()
    assert callable(given.add_provider_for_devices)
    given.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    given.add_free_dimension_override_by_name("capacity", 64)
    path = str(rig.bundle.graph_path("decode"))
    session = ort.InferenceSession(path, given, providers=[CPU], enable_fallback=0)
    shapes = {x.name: x.shape for x in session.get_inputs()}
    assert shapes["past_key_0"] == ["batch", 2, 64, 16]
    parts = session.get_provider_graph_assignment_info()
    assert {part.ep_name for part in parts} == {CPU}
    assert {"Attention", "TensorScatter"} <= {x.op_type for p in parts for x in p.get_nodes()}


@pytest.mark.parametrize("choice", ["tensorrt", "nv-tensorrt-rtx"])
def test_graphs_with_lengths_are_refused(rig: Any, choice: Any) -> None:
    """TensorRT's parser would drop them."""
    with pytest.raises(UsageError, match=r"parser drops.*--attention mask"):
        find_engine_provider(rig.bundle, choice, CHUNK)


def test_bundles_of_other_targets_are_refused(rig: Any) -> None:
    for target in ("cuda", "cpu"):
        other = Bundle(rig.bundle.folder, replace(rig.bundle.manifest, target=target))
        with pytest.raises(UsageError, match=f"target is {target}, .*--attention mask"):
            find_engine_provider(other, "tensorrt", CHUNK)


def test_a_graph_that_is_no_graph(setup: Setup) -> None:
    setup.rig.bundle.graph_path("decode").write_bytes(b"\xff\xff")
    with pytest.raises(BundleError, match=r"decode.onnx"):
        setup.found()


def test_what_is_missing_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(masks=True)
    ort = FakeEngineOrt(onnxruntime, rig.device)
    ort.providers = [CUDA, CPU]
    machinery = OrtMachinery(lambda: ort, lambda: rig.device)
    with pytest.raises(UsageError, match=r"does not have it; .*tensorrt-cu13==10"):
        find_engine_provider(rig.bundle, "tensorrt", CHUNK, machinery)
    monkeypatch.setitem(sys.modules, RTX_MODULE, None)
    with pytest.raises(UsageError, match="pip install onnxruntime-gpu onnxruntime-ep-nv"):
        find_engine_provider(rig.bundle, "nv-tensorrt-rtx", CHUNK, machinery)
    monkeypatch.setitem(sys.modules, RTX_MODULE, Plugin(RTX_MODULE))
    with monkeypatch.context() as patch:
        patch.setattr(ort, "get_ep_devices", list)
        with pytest.raises(UsageError, match="finds no GPU"):
            find_engine_provider(rig.bundle, "nv-tensorrt-rtx", CHUNK, machinery)

    def fails(name: str, path: str) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    other = FakeEngineOrt(onnxruntime, rig.device)
    monkeypatch.setattr(other, "register_execution_provider_library", fails)
    machinery = OrtMachinery(lambda: other, lambda: rig.device)
    with pytest.raises(UsageError, match=r"cannot be loaded: libcuda.so.1"):
        find_engine_provider(rig.bundle, "nv-tensorrt-rtx", CHUNK, machinery)


def test_choices_that_are_none_or_contradict_each_other(rig: Any) -> None:
    wrong: Any = "cuda"
    with pytest.raises(UsageError, match="allowed: auto, tensorrt, nv-tensorrt-rtx"):
        choose_provider(rig.bundle, wrong, "auto", CHUNK)
    with pytest.raises(UsageError, match="leave one of them out"):
        choose_provider(rig.bundle, "tensorrt", "tensorrt", CHUNK)
    assert choose_provider(rig.bundle, "auto", "tensorrt", CHUNK) is None


def test_an_interrupted_prompt_and_a_failed_run_leave_the_session_sound(setup: Setup) -> None:
    session = setup.session()
    it = setup.rig.driver(session=session)
    prefill = next(x for x in setup.ort.sessions if Path(x.path).stem == "prefill")
    batch = setup.rig.batch("prefill", 0, [(0, [1, 2, 3])])
    prefill.before_run = lambda options: session.interrupt()
    with pytest.raises(RunInterruptedError):
        session.run(batch)

    def fails(options: Any) -> None:
        raise RuntimeError("CUDA failure 2: out of memory")

    prefill.before_run = fails
    with pytest.raises(StepError, match="onnxruntime, prefill: CUDA failure 2"):
        session.run(batch)
    prefill.before_run = lambda options: None
    it.run("prefill", 0, [[1, 2, 3]])

    def breaks(options: Any) -> None:
        raise RuntimeError("CUDA failure 719: unspecified launch failure")

    prefill.before_run = breaks
    with pytest.raises(EngineDeadError, match="lost to this process"):
        session.run(batch)


@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_both_faces_take_the_provider(
    face: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    machinery = OrtMachinery(lambda: setup.ort, lambda: setup.rig.device)
    monkeypatch.setattr(ort_tensorrt, "OrtMachinery", lambda: machinery)
    options = {"max_num_batched_tokens": CHUNK, "provider": setup.choice}
    with pytest.raises(UsageError, match="kernels"):
        face(setup.rig.bundle.folder, kernels="native", **options)
    assert setup.rig.device.addresses == ()
    llm = face(setup.rig.bundle.folder, **options)
    if face is AsyncLLM:
        asyncio.run(llm.close())
        return
    asked = [[3, 1, 4, 1, 5], [9, 2], [6] * 20]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with llm:
        outputs = llm.generate(prompt_token_ids=asked, params=params)
    made = [output.outputs[0].token_ids for output in outputs]
    assert made == [setup.rig.model.greedy(prompt, 6) for prompt in asked]
