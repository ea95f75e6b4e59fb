"""The kernels that ONNX Runtime's CUDA provider has, as recorded from one release.

The file is what `record.py` writes. A kernel stands for the versions of an operator from `since` to
`until`, and for the types that it names; an operator's schema says which of its inputs and outputs
have which type parameter.
Source: ONNX Runtime, docs/OperatorKernels.md, CUDAExecutionProvider.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

DATA = "data/cuda_kernels.json.gz"
NEWEST = 2**31 - 1


@dataclass(frozen=True)
class Kernel:
    """One kernel: versions `since` to `until` of its operator, and the types, "tensor(float16)" and
    the like, that each type parameter may have."""

    since: int
    until: int
    types: Mapping[str, tuple[str, ...]]

    def runs(self, version: int) -> bool:
        """Whether it is a kernel of the operator whose schema is of that opset version."""
        if self.since == version:
            return True
        return self.since < version <= self.until != NEWEST


@dataclass(frozen=True)
class Parameter:
    """An input or output of an operator: a type parameter or a type; `many`: any number of it."""

    type: str
    many: bool


@dataclass(frozen=True)
class Schema:
    """What an operator takes and gives from opset version `since` on."""

    since: int
    max_inputs: int
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]


@dataclass(frozen=True)
class KernelList:
    """Kernels and schemas by domain ("" is ai.onnx) and operator; `version` of the release."""

    version: str
    kernels: Mapping[tuple[str, str], tuple[Kernel, ...]]
    schemas: Mapping[tuple[str, str], tuple[Schema, ...]]

    def schema(self, domain: str, operator: str, opset: int) -> Schema | None:
        """The newest schema that a graph of that opset version can mean."""
        found = [s for s in self.schemas.get((domain, operator), ()) if s.since <= opset]
        return max(found, key=lambda s: s.since, default=None)


def load_kernel_list() -> KernelList:
    """The list that comes with the package."""
    packed = (files("trtllm_lite.exporter") / DATA).read_bytes()
    return parse_kernel_list(json.loads(gzip.decompress(packed)))


def parse_kernel_list(plain: Mapping[str, Any]) -> KernelList:
    """From the plain data that `record.py` writes."""
    kernels: dict[tuple[str, str], list[Kernel]] = {}
    for domain, operator, since, until, types in plain["kernels"]:
        allowed = {name: tuple(kinds) for name, kinds in types.items()}
        kernels.setdefault((domain, operator), []).append(Kernel(since, until, allowed))
    schemas: dict[tuple[str, str], list[Schema]] = {}
    for domain, operator, since, most, inputs, outputs in plain["schemas"]:
        made = Schema(since, most, _parameters(inputs), _parameters(outputs))
        schemas.setdefault((domain, operator), []).append(made)
    return KernelList(
        plain["onnxruntime"],
        {key: tuple(found) for key, found in kernels.items()},
        {key: tuple(found) for key, found in schemas.items()},
    )


def _parameters(plain: list[tuple[str, bool]]) -> tuple[Parameter, ...]:
    return tuple(Parameter(kind, many) for kind, many in plain)
