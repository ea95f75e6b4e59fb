"""Two builds of one graph by TensorRT-RTX give the same plan.

It numbers values of its own, and orders operations that do not depend on each other, by where they
lie in memory, which its threads make different in one build of some. Builds differ in nothing else:
in new processes whose memory is laid out alike (no randomisation of addresses, one seed of hashes)
most of them are the same bytes, and any two have the same size, kernels and weights. A plan holds
no time, no path and no name of the machine.
"""

import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.plan_builder import BuiltPlan, PlanRequest, build_plan
from trtllm_lite.runtime.engines.profiles import EngineLimits, profiles
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.progress import NoProgress

LIMITS = EngineLimits(4, 64, 64)
GPUS = ("sm86", "sm89", "sm120")
PHASES: tuple[Phase, ...] = ("prefill", "decode", "extend")
# A build that is watched has one more thread.
PROGRAM = """
import hashlib, pickle, sys
from trtllm_lite.runtime.engines import plan_builder
from trtllm_lite.runtime.engines.trt_module import require_tensorrt
from trtllm_lite.runtime.progress import NoProgress
plan_builder.watched = lambda module, build, progress: build(None)
request = pickle.load(sys.stdin.buffer)
plan = plan_builder.build_plan(require_tensorrt(request.gpus, None), request, NoProgress())
print(hashlib.sha256(plan.data).hexdigest(), plan.data.nbytes)
"""
TAG = re.compile(rb"[\x00-\x7f]\x80\x01\x00", re.DOTALL)
"""Stands before every value of the tables of operations (TensorRT-RTX 1.7.1, seen in its plans)."""
NEAR = 128
"""Bytes behind a tag that may belong to its value, which may be a list of numbers."""
TRIES = 6


def request_of(bundle: Bundle, phase: Phase) -> PlanRequest:
    graph = bundle.manifest.graph(phase)
    path, boxes = bundle.graph_path(phase), profiles(graph, LIMITS)
    return PlanRequest(graph, path, boxes, LIMITS.capacity, GPUS, exact=False, form="lengths")


def in_new_process(request: PlanRequest) -> str:
    """Hash and size of the plan, built where addresses are the same every time."""
    command = ["setarch", "-R", sys.executable, "-c", PROGRAM]
    env = {"PYTHONHASHSEED": "0", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        command, input=pickle.dumps(request), env=env, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def can_fix_addresses() -> bool:
    """A container may forbid it."""
    if shutil.which("setarch") is None:
        return False
    tried = subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.skipif(not can_fix_addresses(), reason="setarch -R is not allowed here")
@pytest.mark.usefixtures("rtx")
def test_a_plan_is_built_again_byte_for_byte(engine_bundle: Bundle) -> None:
    request, seen = request_of(engine_bundle, "extend"), list[str]()
    while len(set(seen)) == len(seen) < TRIES:
        seen.append(in_new_process(request))
    assert int(seen[0].split()[1]) > 100_000
    assert len(set(seen)) < len(seen)
    other = replace(request, capacity=request.capacity + 64)
    assert in_new_process(other) not in seen


def outside_of_the_tables(plan: bytes) -> npt.NDArray[np.bool_]:
    """Which bytes of a plan are not near a tag."""
    far = np.ones(len(plan), np.bool_)
    for match in TAG.finditer(plan):
        far[match.start() : match.end() + NEAR] = False
    return far


@pytest.mark.parametrize("phase", PHASES)
def test_builds_of_one_process_have_the_same_kernels_and_weights(
    rtx: TensorRT, engine_bundle: Bundle, phase: Phase
) -> None:
    plans = [build_plan(rtx, request_of(engine_bundle, phase), NoProgress()) for _ in range(3)]
    first, *others = plans
    bytes_of_first = np.frombuffer(first.data, np.uint8)
    far = outside_of_the_tables(bytes(first.data))
    assert far.mean() > 0.95
    for other in others:
        assert other.data.nbytes == first.data.nbytes
        differ = bytes_of_first != np.frombuffer(other.data, np.uint8)
        assert not (differ & far).any()
        assert differ.sum() < 1000
        assert without_bytes(first) == without_bytes(other)


def without_bytes(plan: BuiltPlan) -> BuiltPlan:
    return replace(plan, data=memoryview(b""))
