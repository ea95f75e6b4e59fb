"""What would run a bundle of each target on this machine, why, and what to install where nothing
would."""

import re
from dataclasses import dataclass, replace

from trtllm_lite.tools.doctor_checks.gpu_facts import GpuFacts
from trtllm_lite.tools.doctor_checks.host_facts import HostFacts
from trtllm_lite.tools.doctor_checks.packages import CUDA_PROVIDER, OnnxRuntime
from trtllm_lite.tools.doctor_checks.tensorrt_facts import TensorRt

OLDEST_CPU = (1, 32)
OLDEST_CUDA = (1, 31)
FLAVOURS = {"cpu": "onnxruntime", "gpu": "onnxruntime-gpu"}
"""Which package of ONNX Runtime an extra brings."""

NATIVE = "pip install 'trtllm-lite[tensorrt]'"
CUDA_LIBRARIES = "pip install 'trtllm-lite[gpu]'"
BINDINGS = "pip install cuda-bindings"


@dataclass(frozen=True)
class Choice:
    """`runs_on` is what would run a bundle of the target, empty when nothing would. `reason`: why
    this and nothing faster. `install`: lines that bring what is missing, in order. `on_gpu`:
    whether it is a GPU."""

    target: str
    runs_on: str
    reason: str
    install: tuple[str, ...] = ()
    on_gpu: bool = False

    @property
    def ready(self) -> bool:
        return bool(self.runs_on)


@dataclass(frozen=True)
class Machine:
    """All that the choice depends on."""

    host: HostFacts
    ort: OnnxRuntime
    tensorrt: TensorRt
    gpu: GpuFacts


def choices(machine: Machine) -> tuple[Choice, ...]:
    """One for each target, in the order of the export's option."""
    cpu = _cpu(machine)
    return cpu, _cuda(machine), _tensorrt(machine, cpu)


def _cpu(machine: Machine) -> Choice:
    lacking = _onnxruntime_problem(machine.ort, OLDEST_CPU, "cpu")
    if lacking is not None:
        return Choice("cpu", "", *lacking)
    name = f"onnxruntime {machine.ort.version}"
    if machine.host.kernels:
        said = "quantized weights: native kernels; others: ONNX Runtime's own operators"
        choice = Choice("cpu", f"{name}, native kernels", said)
    else:
        choice = Choice("cpu", name, f"no native kernels: {machine.host.kernels_reason}")
    return _with_problem(choice, machine.ort, "cpu")


def _with_problem(choice: Choice, ort: OnnxRuntime, extra: str) -> Choice:
    """The choice with what is wrong although it runs, and the lines that mend it."""
    if not ort.problem:
        return choice
    reason = f"{choice.reason}; {ort.problem}"
    return replace(choice, reason=reason, install=_install(ort, extra))


def _cuda(machine: Machine) -> Choice:
    if not machine.gpu.gpus:
        return Choice("cuda", "", machine.gpu.problem)
    lacking = _onnxruntime_problem(machine.ort, OLDEST_CUDA, "gpu")
    if lacking is not None:
        return Choice("cuda", "", *lacking)
    if CUDA_PROVIDER not in machine.ort.providers:
        said = f"onnxruntime {machine.ort.version} has no {CUDA_PROVIDER}"
        return Choice("cuda", "", said, _install(machine.ort, "gpu"))
    if machine.ort.cuda_problem:
        said = f"{CUDA_PROVIDER} lacks a library: {machine.ort.cuda_problem}"
        return Choice("cuda", "", said, (CUDA_LIBRARIES,))
    if not machine.tensorrt.cuda_bindings:
        return Choice("cuda", "", "cuda-bindings is not installed", (BINDINGS,))
    gpu = machine.gpu.gpus[0]
    said = f"{CUDA_PROVIDER} is there, and so is GPU 0 ({gpu.sm})"
    name = f"onnxruntime {machine.ort.version} on {gpu.name}"
    return _with_problem(Choice("cuda", name, said, on_gpu=True), machine.ort, "gpu")


def _tensorrt(machine: Machine, cpu: Choice) -> Choice:
    """With no GPU or no TensorRT, ONNX Runtime computes the same graphs on the CPU."""
    lacking = _tensorrt_problem(machine)
    if lacking is None:
        gpu = machine.gpu.gpus[0]
        trt = machine.tensorrt.for_gpu(gpu.sm)
        name = f"{trt.name} {trt.version}" if trt else ""
        said = f"{name} is there, and so is GPU 0 ({gpu.sm}); needs plans: trtllm-lite build"
        return Choice("tensorrt", f"{name} on {gpu.name}", said, on_gpu=True)
    reason, install = lacking
    if cpu.ready:
        return Choice(
            "tensorrt", f"{cpu.runs_on.split(',')[0]} on the CPU, slowly", reason, install
        )
    return Choice("tensorrt", "", reason, (*install, *cpu.install))


def _tensorrt_problem(machine: Machine) -> tuple[str, tuple[str, ...]] | None:
    """What is wrong and the lines that mend it, or None."""
    trt, gpus = machine.tensorrt, machine.gpu.gpus
    if not gpus:
        return machine.gpu.problem, ()
    if not trt.found:
        return trt.problem, ()
    if trt.for_gpu(gpus[0].sm) is None:
        names = ", ".join(f"{found.name} {found.version}" for found in trt.found)
        return f"{names} has no kernels for {gpus[0].sm} ({gpus[0].name})", (NATIVE,)
    if not trt.cuda_bindings:
        return "cuda-bindings is not installed", (BINDINGS,)
    return None


def _onnxruntime_problem(
    ort: OnnxRuntime, oldest: tuple[int, int], extra: str
) -> tuple[str, tuple[str, ...]] | None:
    """What is wrong and the lines that mend it, or None."""
    if not ort.version:
        return f"onnxruntime: {ort.problem}", _install(ort, extra)
    found = tuple(int(x) for x in re.findall(r"\d+", ort.version)[:2])
    if found < oldest:
        needed = ".".join(map(str, oldest))
        return f"onnxruntime {ort.version} is older than {needed}", _install(ort, extra)
    return None


def _install(ort: OnnxRuntime, extra: str) -> tuple[str, ...]:
    """The lines for an extra. Packages that share one module overwrite each other's files, and who
    is uninstalled takes those of the other along: where there is another, all go first."""
    others = [name for name in ort.flavours if name != FLAVOURS[extra]]
    first = (f"pip uninstall -y {' '.join(ort.flavours)}",) if others else ()
    return (*first, f"pip install -U 'trtllm-lite[{extra}]'")
