"""A model exported for TensorRT, on the fake one: the tokens of the same model exported for the
CPU, through the engine and through the server."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import onnxruntime
import pytest

from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.backends import tensorrt
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.fake_tensorrt import FakeTensorRT
from trtllm_lite.runtime.backends.tensorrt import Machinery
from trtllm_lite.runtime.backends.trt_session import TrtSession
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.engines.profiles import EngineLimits
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.app import create_app
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import ServerConfig

FITS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_model_len": 40, "max_num_seqs": 3}
PROMPTS = ["the river ran", "count the swallows under its roof", "the old mill", "its", "naïve 水"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("tensorrt") / "tiny-llama"
    options = ExportOptions(
        model=str(tiny_checkpoint),
        output=output,
        target="tensorrt",
        dtype="float32",
        max_num_seqs=4,
        verify=False,
    )
    export(options, NoProgress())
    return output


@pytest.fixture
def here(
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_fake_plans: Callable[[Bundle, EngineLimits], None],
) -> Path:
    """The bundle with plans, on a machine that has the fake TensorRT."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    for file in exported.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    write_fake_plans(open_bundle(folder), EngineLimits(3, 40, 16))
    device = FakeDevice()
    trt = TensorRT(FakeTensorRT(onnxruntime, device), "tensorrt", "10.16.1.11")
    machinery = Machinery(lambda: (trt,), lambda: device)
    monkeypatch.setattr(tensorrt, "Machinery", lambda: machinery)
    return folder


def texts(llm: LLM) -> list[str]:
    return [out.outputs[0].text for out in llm.generate(PROMPTS, GREEDY)]


def test_the_tokens_are_those_of_the_cpu_bundle(here: Path, tiny_bundle: Path) -> None:
    with LLM(here, **FITS) as llm:
        assert isinstance(llm._parts.engine._session, TrtSession)
        made = texts(llm)
        assert texts(llm) == made
    with LLM(tiny_bundle, intra_op_num_threads=1, **FITS) as llm:
        assert texts(llm) == made
    assert len(set(made)) > 1


def test_the_server_runs_on_it(here: Path, tiny_bundle: Path) -> None:
    async def ask() -> list[str]:
        service = Service(ServerConfig())
        async with AsyncLLM(here, **FITS) as llm:
            service.ready(llm, ModelCard(("tiny",), 0, "fp"))
            transport = httpx.ASGITransport(create_app(service, "0"))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                body = {"max_tokens": 10, "temperature": 0}
                replies = await asyncio.gather(
                    *(client.post("/v1/completions", json={"prompt": p, **body}) for p in PROMPTS)
                )
                metrics = await client.get("/metrics")
        assert "trtllm_lite_" in metrics.text
        return [reply.json()["choices"][0]["text"] for reply in replies]

    made = asyncio.run(ask())
    with LLM(tiny_bundle, intra_op_num_threads=1, **FITS) as llm:
        assert texts(llm) == made


def test_a_gpu_that_is_lost_takes_the_server_out_of_service(here: Path) -> None:
    """One request is answered; then the device breaks under the next two, of which one waits."""
    device: Any = tensorrt.Machinery().open_device()
    body = {"prompt": "its", "max_tokens": 30, "temperature": 0}

    async def ask() -> list[tuple[int, Any]]:
        service = Service(ServerConfig())
        async with AsyncLLM(here, **(FITS | {"max_num_seqs": 1})) as llm:
            service.ready(llm, ModelCard(("tiny",), 0, "fp"))
            transport = httpx.ASGITransport(create_app(service, "0"))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                sound = await client.post("/v1/completions", json=body)
                live = await client.get("/live")
                device.lose("CUDA: cudaStreamSynchronize failed: an illegal memory access")
                failed = await asyncio.gather(
                    *(client.post("/v1/completions", json=body) for _ in range(2))
                )
                probes = [await client.get(path) for path in ("/live", "/ready", "/health")]
        assert service.died.is_set()
        assert "lost to this process, which has to be started again" in service.reason
        return [(x.status_code, x.json()) for x in (sound, live, *failed, *probes)]

    (sound, _), (live, _), *failed, dead, unready, unhealthy = asyncio.run(ask())
    assert (sound, live) == (200, 200)
    for status, answer in failed:
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
    assert {status for status, _ in (dead, unready, unhealthy)} == {503}
