"""Opening a bundle of target "cuda": what ONNX Runtime is asked for, what is refused in a line."""

from dataclasses import replace
from typing import Any

import pytest

from trtllm_lite.runtime.backends import ort_cuda
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.device import DeviceError
from trtllm_lite.runtime.backends.ort_cuda import open_on, open_session, version
from trtllm_lite.runtime.backends.ort_providers import CPU, CUDA
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import BundleError, MissingExtraError, UsageError
from trtllm_lite.runtime.manifest import FileEntry

OPTIONS = SessionOptions(4, 96)


def test_the_provider_gets_our_stream_and_makes_cuda_graphs(make_rig: Any) -> None:
    rig = make_rig()
    (name, options), fallback = rig.ort.providers
    assert (name, fallback) == (CUDA, CPU)
    assert options["user_compute_stream"] == str(rig.device.stream)
    assert options["enable_cuda_graph"] == "1"


def test_slots_begin_where_a_tensor_may(make_rig: Any) -> None:
    rig = make_rig(num_slots=3, capacity=97)
    assert rig.session.pool.capacity == 128
    assert rig.session.info.kv_reserved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 0}, "num_slots: got 0"),
        ({"kernels": "native"}, "kernels: got 'native'"),
        ({"rounding": "exact"}, "rounding: got 'exact'"),
        ({"kv_dtype": "int8"}, "the bundle has float32"),
        ({"phases": ("prefill",)}, "'decode' is always needed"),
    ],
)
def test_options_that_cannot_be_honoured(
    toy_bundle: Bundle, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_session(toy_bundle, replace(OPTIONS, **change))


def test_a_bundle_of_another_target(toy_bundle: Bundle) -> None:
    other = Bundle(toy_bundle.folder, replace(toy_bundle.manifest, target="cpu"))
    with pytest.raises(BundleError, match="'cpu'; this backend runs 'cuda'"):
        open_session(other, OPTIONS)


def test_two_graphs_that_differ(toy_bundle: Bundle, make_rig: Any) -> None:
    first, second = toy_bundle.manifest.files
    files = (first, FileEntry(second.path, second.size, "0" * 64))
    other = Bundle(toy_bundle.folder, replace(toy_bundle.manifest, files=files))
    rig = make_rig()
    with pytest.raises(BundleError, match=r"prefill.onnx and decode.onnx differ"):
        open_on(rig.ort, rig.device, other, OPTIONS)
    assert rig.device.addresses == ()


def test_a_provider_that_cannot_be_loaded(toy_bundle: Bundle, make_rig: Any) -> None:
    """ONNX Runtime then goes on with the next one in silence."""
    rig = make_rig()
    rig.ort.loads = [CPU]
    with pytest.raises(UsageError, match="could not load its CUDA provider"):
        open_on(rig.ort, rig.device, toy_bundle, OPTIONS)


def test_a_pool_that_does_not_fit(toy_bundle: Bundle, make_rig: Any) -> None:
    rig = make_rig()
    with pytest.raises(UsageError, match="lower max_num_seqs"):
        open_on(rig.ort, rig.device, toy_bundle, SessionOptions(200_000, 96))


class CpuOnly:
    __version__ = "1.32.0"

    def get_available_providers(self) -> list[str]:
        return [CPU]


class WithCuda(CpuOnly):
    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]


def test_the_package_for_the_cpu_is_not_enough(
    toy_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_cuda, "import_onnxruntime", lambda *args: CpuOnly())
    for needs in (lambda: open_session(toy_bundle, OPTIONS), version):
        with pytest.raises(MissingExtraError, match=r"onnxruntime-gpu.*trtllm-lite\[gpu\]"):
            needs()


def test_no_gpu_is_said_in_one_line(toy_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> None:
        raise DeviceError("CUDA: cudaSetDevice failed: no CUDA-capable device is detected")

    monkeypatch.setattr(ort_cuda, "import_onnxruntime", lambda *args: WithCuda())
    monkeypatch.setattr(ort_cuda, "open_cuda", no_gpu)
    with pytest.raises(UsageError, match=r"no GPU can be used here.*--target cpu") as caught:
        open_session(toy_bundle, OPTIONS)
    assert "\n" not in str(caught.value)
