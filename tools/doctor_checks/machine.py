"""Everything that doctor reports of a machine, as one value."""

from dataclasses import asdict, dataclass
from typing import Any

from trtllm_lite.tools.doctor_checks.choices import Choice, Machine, choices
from trtllm_lite.tools.doctor_checks.gpu_facts import read_gpus
from trtllm_lite.tools.doctor_checks.host_facts import read_host
from trtllm_lite.tools.doctor_checks.packages import Package, read_onnxruntime, read_packages
from trtllm_lite.tools.doctor_checks.tensorrt_facts import read_tensorrt


@dataclass(frozen=True)
class Report:
    """What was found and what follows from it."""

    packages: tuple[Package, ...]
    machine: Machine
    choices: tuple[Choice, ...]

    @property
    def ready(self) -> bool:
        """Whether anything could run a bundle."""
        return any(choice.ready for choice in self.choices)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json` and for the records of --gpu."""
        found = asdict(self.machine)
        return {
            "ready": self.ready,
            "packages": {p.name: p.version or None for p in self.packages},
            "other_versions": {p.name: p.problem for p in self.packages if p.problem},
            "host": found["host"],
            "gpu": found["gpu"],
            "onnxruntime": found["ort"],
            "tensorrt": found["tensorrt"],
            "choices": [asdict(c) | {"ready": c.ready} for c in self.choices],
        }


def examine() -> Report:
    """Look at this machine. Changes nothing, and never raises for what is missing."""
    machine = Machine(read_host(), read_onnxruntime(), read_tensorrt(), read_gpus())
    return Report(read_packages(), machine, choices(machine))
