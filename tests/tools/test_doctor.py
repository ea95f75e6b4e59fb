"""The doctor command: what it prints, writes and ends with."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.tools.cli import cli
from trtllm_lite.tools.doctor_checks import machine as machine_module
from trtllm_lite.tools.doctor_checks import proof
from trtllm_lite.tools.doctor_checks.choices import Machine, choices
from trtllm_lite.tools.doctor_checks.files import write_json
from trtllm_lite.tools.doctor_checks.gpu_facts import Gpu, GpuFacts
from trtllm_lite.tools.doctor_checks.host_facts import read_host
from trtllm_lite.tools.doctor_checks.jobs import SMOLLM2, TINY, Job
from trtllm_lite.tools.doctor_checks.machine import Report
from trtllm_lite.tools.doctor_checks.packages import OnnxRuntime, Package
from trtllm_lite.tools.doctor_checks.result import CheckResult, Status
from trtllm_lite.tools.doctor_checks.runner import WORKER
from trtllm_lite.tools.doctor_checks.tensorrt_facts import FoundTensorRt, TensorRt

GPUS = GpuFacts((Gpu(0, "NVIDIA L4", "sm89", 24 * 2**30, 23 * 2**30),), "580.1", "13.0", "nvml")
ORT = OnnxRuntime("1.32.0", ("onnxruntime-gpu",), ("CUDAExecutionProvider",))
TRT = TensorRt((FoundTensorRt("tensorrt", "11.4", ()),), "13.0")


def report(gpu: GpuFacts = GPUS, ort: OnnxRuntime = ORT, trt: TensorRt = TRT) -> Report:
    drawn = Machine(read_host(), ort, trt, gpu)
    packages = (Package("python", "3.11.0"), Package("numpy", ""))
    return Report(packages, drawn, choices(drawn))


BARE = report(GpuFacts(problem="no NVIDIA driver"), OnnxRuntime(problem="it is not installed"))


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Runs the command on a drawn machine."""
    monkeypatch.chdir(tmp_path)

    def run(found: Report, *args: str) -> Result:
        monkeypatch.setattr(machine_module, "examine", lambda: found)
        return CliRunner().invoke(cli, ["doctor", *args])

    return run


def test_the_report(doctor: Callable[..., Result], tmp_path: Path) -> None:
    result = doctor(report())
    assert result.exit_code == 0
    for text in (
        "onnxruntime 1.32.0 on NVIDIA L4",
        "tensorrt 11.4 on NVIDIA L4",
        "GPUs (driver 580.1, CUDA 13.0, by nvml)",
        "24.0 GiB",
        "python   3.11.0",
        "numpy    -",
    ):
        assert text in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_machine_where_nothing_runs(doctor: Callable[..., Result]) -> None:
    result = doctor(BARE)
    assert result.exit_code == 1
    assert "nothing here could run a bundle: pip install 'trtllm-lite[cpu]'" in result.stderr
    assert "no NVIDIA driver" in result.stdout


def test_this_very_machine_can_run_a_bundle() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ready"]) == (0, True)
    assert found["packages"]["numpy"]


def test_json(doctor: Callable[..., Result], tmp_path: Path) -> None:
    result = doctor(report(), "--json", "--output", "new/folder")
    found = json.loads(result.stdout)
    assert [c["target"] for c in found["choices"]] == ["cpu", "cuda", "tensorrt"]
    assert [c["ready"] for c in found["choices"]] == [True, True, True]
    assert found["gpu"]["gpus"][0]["sm"] == "sm89"
    assert found["packages"] == {"python": "3.11.0", "numpy": None}
    assert json.loads((tmp_path / "new/folder/doctor.json").read_text()) == found


def test_gpu_without_one_is_one_line(doctor: Callable[..., Result], tmp_path: Path) -> None:
    result = doctor(BARE, "--gpu")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: --gpu: no NVIDIA driver\n"
    assert list(tmp_path.iterdir()) == []


def test_gpu_needs_the_packages_of_the_export(
    doctor: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "installed", lambda name: "")
    result = doctor(report(), "--gpu")
    assert result.exit_code == 1
    assert "torch is not installed: pip install 'trtllm-lite[export]'" in result.stderr


def test_packages_of_other_versions_are_told_first(
    doctor: Callable[..., Result], scripted: "ScriptedRunner"
) -> None:
    torch = Package("torch", "2.11.0", "trtllm-lite asks for >=2.13")
    result = doctor(replace(report(), packages=(torch,)), "--gpu", "--json")
    assert "warning: torch 2.11.0: trtllm-lite asks for >=2.13" in result.stderr
    found = json.loads(result.stdout)["machine"]
    assert found["other_versions"] == {"torch": "trtllm-lite asks for >=2.13"}


@dataclass
class ScriptedRunner:
    """Gives every job one result, whose status its target decides."""

    status: dict[str, Status]
    jobs: list[Job]

    def __call__(self, folder: Path, limit_s: float, worker: tuple[str, ...]) -> "ScriptedRunner":
        assert folder.is_dir()
        assert limit_s < 8 * 60
        assert worker == WORKER
        return self

    def run(self, job: Job, told: Callable[[CheckResult], None]) -> list[CheckResult]:
        self.jobs.append(job)
        status = self.status[job.target]
        numbers = {"tpot_ms": 1.25, "distance": float("inf")}
        result = CheckResult(
            "a check", job.lane, status, "why" if status != "passed" else "", numbers
        )
        told(result)
        return [result]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedRunner:
    runner = ScriptedRunner({"cuda": "passed", "tensorrt": "passed"}, [])
    monkeypatch.setattr(proof, "Runner", runner)
    return runner


def test_gpu_runs_every_backend_and_keeps_the_results(
    doctor: Callable[..., Result], scripted: ScriptedRunner, tmp_path: Path
) -> None:
    result = doctor(report(), "--gpu", "--output", "out")
    assert result.exit_code == 0
    order = [(job.target, job.model) for job in scripted.jobs]
    assert order == [
        ("tensorrt", TINY),
        ("cuda", TINY),
        ("cuda", SMOLLM2),
        ("tensorrt", SMOLLM2),
        ("tensorrt", TINY),
        ("tensorrt", TINY),
    ]
    forms = [job.form for job in scripted.jobs]
    assert forms == [*["usual"] * 4, "shared weights", "single engine"]
    kept = json.loads((tmp_path / "out/doctor-gpu.json").read_text())
    assert kept["summary"] == {"passed": 6, "failed": 0, "skipped": 0}
    assert kept["machine"]["gpu"]["driver"] == "580.1"
    assert kept["results"][0]["numbers"] == {"tpot_ms": 1.25, "distance": None}
    assert "6 passed, 0 failed, 0 skipped" in result.stdout
    assert "tpot_ms 1.25" in result.stdout
    assert not Path(scripted.jobs[0].folder).exists()


def test_one_failure_fails_the_whole(
    doctor: Callable[..., Result], scripted: ScriptedRunner
) -> None:
    scripted.status["tensorrt"] = "failed"
    result = doctor(report(), "--gpu", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["summary"] == {"passed": 2, "failed": 4, "skipped": 0}
    assert "tensorrt, tiny: a check: failed (why)" in result.stderr


def test_a_backend_that_is_not_there_is_skipped_with_its_lines(
    doctor: Callable[..., Result], scripted: ScriptedRunner, tmp_path: Path
) -> None:
    found = report(trt=TensorRt(cuda_bindings="13.0", problem="no TensorRT; pip install it"))
    result = doctor(found, "--gpu")
    assert result.exit_code == 0
    assert {job.target for job in scripted.jobs} == {"cuda"}
    kept: dict[str, Any] = json.loads((tmp_path / "doctor-gpu/doctor-gpu.json").read_text())
    assert kept["results"][0]["lane"] == "tensorrt"
    assert kept["results"][0]["status"] == "skipped"
    assert "no TensorRT; pip install it" in kept["results"][0]["reason"]


def test_nothing_that_ran_is_no_proof(
    doctor: Callable[..., Result], scripted: ScriptedRunner
) -> None:
    scripted.status = {"cuda": "skipped", "tensorrt": "skipped"}
    assert doctor(report(), "--gpu").exit_code == 1


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [("NVIDIA L4", 300e9), ("NVIDIA H100 80GB HBM3", 3350e9), ("NVIDIA GT 1030", None)],
)
def test_the_bandwidth_is_that_of_the_table(
    doctor: Callable[..., Result], scripted: ScriptedRunner, name: str, bandwidth: float | None
) -> None:
    doctor(report(GpuFacts((replace(GPUS.gpus[0], name=name),))), "--gpu")
    assert {job.bandwidth for job in scripted.jobs} == {bandwidth}


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a" / "b", "x.json", {"n": [1.5, float("nan")]})
    assert json.loads(path.read_text()) == {"n": [1.5, None]}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
