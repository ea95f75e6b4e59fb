"""Which nodes ONNX Runtime computes on CUDA: by the recorded list, and by its own partitioner over
stub libraries, which needs onnxruntime-gpu and skips without it."""

import ctypes
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.cuda_placement import check, check_cuda_graph, check_cuda_model
from trtllm_lite.exporter.cuda_placement.by_list import misplaced_nodes
from trtllm_lite.exporter.cuda_placement.check import check_by_partitioner
from trtllm_lite.exporter.cuda_placement.kernel_list import (
    NEWEST,
    Kernel,
    KernelList,
    load_kernel_list,
)
from trtllm_lite.exporter.cuda_placement.stubs import make_stubs, missing_tools
from trtllm_lite.runtime.errors import UnsupportedError

CACHE = "[batch, 1, capacity, 16]"


@pytest.fixture(scope="module")
def kernels() -> KernelList:
    return load_kernel_list()


def read(inputs: str, outputs: str, body: str, values: str = "") -> ir.Model:
    """`values`: constants, as the parser takes them."""
    constants = f"<{values}>" if values else ""
    model: ir.Model = ir.from_proto(
        onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>'
            f"g ({inputs}) => ({outputs}) {constants} {{ {body} }}"
        )
    )
    return model


def attention(kind: str, more: str = "", longest: str = "longest") -> ir.Model:
    inputs = ", ".join(f"{kind}[batch, seq, 16] {n}" for n in "qkv")
    cache = f"{kind}{CACHE} past_key, {kind}{CACHE} past_value"
    shapes = f"{kind}[batch, seq, 16] out, {kind}{CACHE} key, {kind}{CACHE} value"
    return read(
        f"{inputs}, {cache}, int32[batch] last, int32[1] longest",
        shapes,
        f"{'most = ReduceMax <keepdims = 0> (last)' if longest == 'most' else ''}"
        "out, key, value = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1>"
        f"(q, k, v, past_key, past_value, last, {longest}{more})",
    )


def problems(model: ir.Model, kernels: KernelList) -> list[tuple[str, str]]:
    return [(found.operator, found.why) for found in misplaced_nodes(model, kernels)]


def test_what_a_step_needs_is_on_cuda(kernels: KernelList) -> None:
    assert kernels.version.startswith("1.31")
    for kind in ("float16", "bfloat16"):
        assert problems(attention(kind), kernels) == []


def test_attention_in_float32_has_no_kernel(kernels: KernelList) -> None:
    ((operator, why),) = problems(attention("float"), kernels)
    assert operator == "GroupQueryAttention"
    assert why.startswith("no CUDA kernel for M = tensor(int32), T = tensor(float)")


@pytest.mark.parametrize(
    ("head", "rotates", "why"),
    [
        (20, False, "heads of 20; its kernels take multiples of 8"),
        (24, True, "heads of 24; its kernels take multiples of 16"),
        (24, False, None),
        (32, True, None),
    ],
)
def test_heads_that_the_attention_takes(
    head: int, rotates: bool, why: str | None, kernels: KernelList
) -> None:
    model = attention("float16")
    node = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    past = node.inputs[3]
    assert past is not None
    past.shape = ir.Shape(["batch", 1, "capacity", head])
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", int(rotates))
    assert problems(model, kernels) == ([("GroupQueryAttention", why)] if why else [])


def test_lengths_of_queries_are_not_in_that_release(kernels: KernelList) -> None:
    more = ", , , , , , , , , , last"
    ((_, why),) = problems(attention("float16", more), kernels)
    assert why == "it takes 16 inputs, the node has 17"


def test_a_length_that_was_computed_on_the_device_is_copied_back(kernels: KernelList) -> None:
    assert problems(attention("float16", longest="most"), kernels) == [
        ("GroupQueryAttention", "it reads 'most' in host memory")
    ]


@pytest.mark.parametrize(
    ("inputs", "outputs", "body", "operator", "why"),
    [
        ("float16[n] x", "int64[1] y", "y = Shape (x)", "Shape", "in host memory"),
        ("int8[n] x", "int8[n] y", "y = Tanh (x)", "Tanh", "no CUDA kernel for T = tensor(int8)"),
        ("float16[n] x", "float16[n] y", "y = Frobnicate (x)", "Frobnicate", "no such operator"),
        (
            "uint8[n, k] x, uint8[k, m] w",
            "int32[n, m] y",
            "y = MatMulInteger (x, w)",
            "MatMulInteger",
            "no CUDA kernel for",
        ),
        (
            "float16[n] x, int64[1] shape, int64[1] more",
            "float16[m] y",
            "sum = Add (shape, more) y = Reshape (x, sum)",
            "Reshape",
            "it reads 'sum'",
        ),
        (
            "float16[n] x, int64[1] shape",
            "float16[m] y, int64[1] z",
            "y = Reshape (x, shape) z = Add (shape, shape)",
            "Reshape",
            "it reads 'shape'",
        ),
    ],
)
def test_what_is_not_on_cuda(
    kernels: KernelList, inputs: str, outputs: str, body: str, operator: str, why: str
) -> None:
    (found,) = problems(read(inputs, outputs, body), kernels)
    assert found[0] == operator
    assert why in found[1]


def test_constants_and_inputs_of_their_own_are_on_the_host(kernels: KernelList) -> None:
    constant = read("float16[n] x", "float16[m] y", "y = Reshape (x, s)", "int64[1] s = {4}")
    given = read("float16[n] x, int64[1] s", "float16[m] y", "y = Reshape (x, s)")
    assert problems(constant, kernels) == problems(given, kernels) == []


def test_types_are_followed_through_the_graph(kernels: KernelList) -> None:
    """What the graph does not declare is known from the node that makes it."""
    chain = read(
        "float[n] x", "float16[n] y", "a = Cast <to = 6> (x) b = Tanh (a) y = Cast <to = 10> (b)"
    )
    ((operator, why),) = problems(chain, kernels)
    assert (operator, why) == ("Tanh", "no CUDA kernel for T = tensor(int32)")


def test_a_type_that_is_not_known_is_said(kernels: KernelList) -> None:
    model = read("float16[n] x", "float16[n] y", "y = Add (x, x)")
    model.graph.inputs[0].type = None
    assert problems(model, kernels) == [("Add", "the type of 'x' is not known")]


def test_a_kernel_stands_for_versions_of_an_operator() -> None:
    bounded, open_ended = Kernel(7, 12, {}), Kernel(13, NEWEST, {})
    assert [bounded.runs(v) for v in (6, 7, 9, 12, 13)] == [False, True, True, True, False]
    # What comes after the release is not known to it.
    assert [open_ended.runs(v) for v in (13, 14)] == [True, False]


def test_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"GroupQueryAttention \(out\).*--target cpu"):
        check_cuda_model(attention("float"))
    assert check_cuda_model(attention("float16")).proof == "kernel list"


def saved(model: ir.Model, folder: Path) -> Path:
    path = folder / "step.onnx"
    ir.save(model, path)
    return path


def test_without_the_package_the_list_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "PACKAGE", "no-such-package")
    made = check_cuda_graph(saved(attention("float16"), tmp_path))
    assert (made.proof, made.why) == ("kernel list", "no-such-package is not installed")


Answer = dict[str, object]


@pytest.fixture
def partitioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer, int], str]:
    """What comes of an answer of the other process."""

    def decided(answer: Answer, code: int = 0) -> str:
        ended = subprocess.CompletedProcess([], code, json.dumps(answer), "first\nlast words\n")
        monkeypatch.setattr(check, "make_stubs", lambda providers, folder: None)
        monkeypatch.setattr(subprocess, "run", lambda *args, **kw: ended)
        return check_by_partitioner(tmp_path / "step.onnx", tmp_path)

    return decided


CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def test_the_partitioner_decides(partitioned: Callable[[Answer, int], str]) -> None:
    node = [CUDA, "Add", "n1"]
    good: Answer = {"onnxruntime": "1.31.1", "nodes": [node], "error": None}
    assert partitioned(good, 0) == "1.31.1"
    with pytest.raises(UnsupportedError, match=r"Sin \(n2\): on CPUExecutionProvider"):
        partitioned({**good, "nodes": [node, [CPU, "Sin", "n2"]]}, 0)
    with pytest.raises(UnsupportedError, match="cannot use the CUDA Graph feature"):
        partitioned({**good, "error": "This session cannot use the CUDA Graph feature"}, 0)
    with pytest.raises(RuntimeError, match="placed no node"):
        partitioned({**good, "nodes": []}, 0)
    with pytest.raises(RuntimeError, match="code 139: last words"):
        partitioned(good, 139)


@pytest.mark.parametrize("code", [139, 0])
def test_a_partitioner_without_an_answer_leaves_it_to_the_list(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stubs fit one release; nothing is known against the graph where they do not."""
    ended = subprocess.CompletedProcess([], code, "no JSON", "killed\n")
    monkeypatch.setattr(check, "_provider", lambda: tmp_path)
    monkeypatch.setattr(check, "missing_tools", list)
    monkeypatch.setattr(check, "make_stubs", lambda providers, folder: None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kw: ended)
    made = check_cuda_graph(saved(attention("float16"), tmp_path))
    assert made.proof == "kernel list"
    assert ("code 139: killed" if code else "Expecting value") in made.why
    with pytest.raises(UnsupportedError, match="GroupQueryAttention"):
        check_cuda_graph(saved(attention("float"), tmp_path))


def test_stubs_are_found_before_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python itself may need what is there."""
    seen: list[str] = []

    def run(*args: object, env: dict[str, str], **kw: object) -> object:
        seen.extend(env["LD_LIBRARY_PATH"].split(os.pathsep))
        answer = {"onnxruntime": "1", "nodes": [[CUDA, "Add", "n"]], "error": None}
        return subprocess.CompletedProcess([], 0, json.dumps(answer), "")

    monkeypatch.setattr(check, "make_stubs", lambda providers, folder: None)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/where/python/is")
    check_by_partitioner(tmp_path / "step.onnx", tmp_path)
    assert len(seen) == 2
    assert "cuda-stubs-" in seen[0]
    assert seen[1] == "/where/python/is"


needs_compiler = pytest.mark.skipif(bool(missing_tools()), reason="needs a compiler and binutils")


@needs_compiler
def test_stubs_stand_in_for_the_libraries_that_are_asked_for(tmp_path: Path) -> None:
    """A library that needs versioned symbols of CUDA can be loaded with nothing but the stubs."""
    real, stubs = tmp_path / "real", tmp_path / "stubs"
    real.mkdir()
    stubs.mkdir()
    name = "libcudart.so.13"
    (real / "map").write_text(f"{name} {{ global: *; }};")
    (real / "cudart.c").write_text("int cudaGetDeviceCount(int *n) { return 100; }")
    linked = [f"-Wl,-soname,{name}", f"-Wl,--version-script={real / 'map'}"]
    compiled("-o", str(real / name), str(real / "cudart.c"), *linked)
    (tmp_path / "provider.c").write_text(
        "int cudaGetDeviceCount(int *); int cuUnversioned(void);"
        "int count(void) { int n = 0; return cudaGetDeviceCount(&n) + cuUnversioned() + n; }"
    )
    provider = tmp_path / "libprovider.so"
    compiled("-o", str(provider), str(tmp_path / "provider.c"), str(real / name))
    make_stubs([provider], stubs)
    asked = f"import ctypes; print(ctypes.CDLL({str(provider)!r}).count())"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stubs)}
    ended = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "1"
    with pytest.raises(OSError, match=r"libcudart|cuUnversioned"):
        ctypes.CDLL(str(provider))


def compiled(*arguments: str) -> None:
    command = ["cc", "-w", "-shared", "-fPIC", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def has_package() -> bool:
    try:
        importlib.metadata.version(check.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_package = pytest.mark.skipif(not has_package(), reason="needs onnxruntime-gpu")


@needs_compiler
@needs_package
def test_onnx_runtime_itself_puts_a_step_on_cuda(tmp_path: Path) -> None:
    made = check_cuda_graph(saved(attention("float16"), tmp_path))
    assert (made.proof, made.why) == ("partitioner", "")


@needs_compiler
@needs_package
@pytest.mark.parametrize(
    "model",
    [
        attention("float"),
        attention("float16", longest="most"),
        read("float16[n] x", "int64[1] y", "z = Shape (x) y = Add (z, z)"),
    ],
    ids=["kernel", "copy", "host"],
)
def test_onnx_runtime_itself_agrees_with_the_list(
    tmp_path: Path, model: ir.Model, kernels: KernelList, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(model, tmp_path)
    assert misplaced_nodes(model, kernels)
    monkeypatch.setattr(check, "check_cuda_model", lambda model: check.Placement("kernel list", ""))
    with pytest.raises(UnsupportedError):
        check_cuda_graph(path)
