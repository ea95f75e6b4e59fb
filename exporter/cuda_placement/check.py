"""Every node of a graph has to be computed on the device, with no copy to the host in between.

A node that falls back to the CPU would be slow in silence, and keeps a decode step from being
captured as a CUDA graph. Two proofs, neither of which needs a GPU: a recorded list of kernels, and,
where onnxruntime-gpu is installed, what its own partitioner says.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from trtllm_lite.exporter.cuda_placement.by_list import misplaced_nodes
from trtllm_lite.exporter.cuda_placement.kernel_list import load_kernel_list
from trtllm_lite.exporter.cuda_placement.stubs import PROVIDER, make_stubs, missing_tools
from trtllm_lite.runtime.errors import UnsupportedError

PACKAGE = "onnxruntime-gpu"
SESSION = "trtllm_lite.exporter.cuda_placement.session"
CUDA = "CUDAExecutionProvider"
SHOWN = 3
TIMEOUT_SECONDS = 300
Proof = Literal["kernel list", "partitioner"]


@dataclass(frozen=True)
class Placement:
    """How it was proved that all nodes are on CUDA, with which version of ONNX Runtime, and why not
    by its partitioner, "" if it was."""

    proof: Proof
    version: str
    why: str = ""


def check_cuda_model(model: ir.Model) -> Placement:
    """By the recorded list. Raises UnsupportedError naming the nodes that are not on CUDA."""
    kernels = load_kernel_list()
    _refuse(map(str, misplaced_nodes(model, kernels)))
    return Placement("kernel list", kernels.version)


def check_cuda_graph(path: Path) -> Placement:
    """By the list, then by the partitioner where it can be had. `path`: a graph beside its weights.

    Raises UnsupportedError naming the nodes that are not on CUDA. A partitioner that gives no
    answer leaves it to the list: other releases need other stubs.
    """
    listed = check_cuda_model(ir.load(path))
    provider = _provider()
    if provider is None:
        return Placement(listed.proof, listed.version, f"{PACKAGE} is not installed")
    if missing := missing_tools():
        return Placement(listed.proof, listed.version, f"{', '.join(missing)} not found")
    try:
        version = check_by_partitioner(path, provider)
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        return Placement(listed.proof, listed.version, why)
    return Placement("partitioner", version)


def check_by_partitioner(path: Path, provider: Path) -> str:
    """Create a session over stub libraries in a process of its own; returns ONNX Runtime's version.

    Raises UnsupportedError for nodes that are not on CUDA, RuntimeError when no session could be
    created for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="cuda-stubs-") as folder:
        make_stubs([provider], Path(folder))
        others = os.environ.get("LD_LIBRARY_PATH")
        paths = os.pathsep.join([folder, *([others] if others else [])])
        environment = {**os.environ, "LD_LIBRARY_PATH": paths}
        command = [sys.executable, "-m", SESSION, str(path.resolve())]
        ended = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the CUDA provider ended with code {ended.returncode}: {last}")
    found = json.loads(ended.stdout)
    elsewhere = [
        f"{op} ({name}): on {where}" for where, op, name in found["nodes"] if where != CUDA
    ]
    _refuse(elsewhere)
    if found["error"] is not None:
        _refuse([found["error"]])
    if not found["nodes"]:
        raise RuntimeError("the CUDA provider placed no node")
    return str(found["onnxruntime"])


def _provider() -> Path | None:
    """The CUDA provider's library of the installed onnxruntime-gpu."""
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("onnxruntime")
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    library = None if origin is None else origin.parent / "capi" / PROVIDER
    return library if library is not None and library.exists() else None


def _refuse(found: Iterable[str]) -> None:
    problems = list(found)
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UnsupportedError(
            f"what ONNX Runtime does not compute on CUDA: {'; '.join(problems[:SHOWN])}{more}",
            "graphs whose every node has a CUDA kernel",
            "export with --target cpu or tensorrt",
        )
