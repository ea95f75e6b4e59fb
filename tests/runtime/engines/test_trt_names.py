"""Every name of TensorRT that the code uses exists: in the lists recorded from the bindings of
10.16.1 and 11.4.0, and in the TensorRT-RTX that is installed."""

import ast
import gzip
import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest

from trtllm_lite.runtime.engines import trt_api
from trtllm_lite.runtime.engines.trt_module import TensorRT

ENGINES = Path(inspect.getfile(trt_api)).parent
RECORDED = ("10.16.1", "11.4.0", "rtx-1.7.1")
# What the code asks for first, or does only where it is there (`TensorRT.has_row_lengths`,
# `TensorRT.nameable_gpus`, `TensorRT.has_user_allocation`): names that one of the versions lacks.
NOT_IN = {
    "10.16.1": {
        "CausalMaskKind",
        "CausalMaskKind.NONE",
        "CausalMaskKind.UPPER_LEFT",
        "CausalMaskKind.LOWER_RIGHT",
        "IAttention.causal_kind",
        "IAttention.key_value_lengths",
        "ComputeCapability",
        "IBuilderConfig.num_compute_capabilities",
        "IBuilderConfig.set_compute_capability",
        "BuilderFlag.REQUIRE_USER_ALLOCATION",
    },
    "11.4.0": {
        "ComputeCapability",
        "IBuilderConfig.num_compute_capabilities",
        "IBuilderConfig.set_compute_capability",
        "BuilderFlag.REQUIRE_USER_ALLOCATION",
    },
    "rtx-1.7.1": set[str](),
}


@cache
def recorded(version: str) -> set[str]:
    """ "Builder", "Builder.create_network", "DataType.INT32", ..."""
    path = Path(__file__).parent / "tensorrt_names.json.gz"
    classes: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))[version]
    names = set(classes)
    for name, members in classes.items():
        inside = members["enum"] if isinstance(members, dict) else members
        names |= {f"{name}.{member}" for member in inside}
    return names


def members_used() -> Iterator[str]:
    """ "IAttention.mask": what the protocols of `trt_api` say that a class of TensorRT has."""
    for protocol in vars(trt_api).values():
        if inspect.isclass(protocol) and issubclass(protocol, Protocol):
            if protocol.__module__ != trt_api.__name__:
                continue
            kind = (protocol.__doc__ or "").split(".")[0].split(" ")[-1]
            own = {*inspect.get_annotations(protocol), *vars(protocol)}
            yield from (f"{kind}.{name}" for name in own if not name.startswith("_"))


def chain_of(node: ast.expr) -> list[str]:
    """`a.b.c` -> [a, b, c]; [] for what is no chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = chain_of(node.value)
        return [*before, node.attr] if before else []
    return []


def names_in(tree: ast.Module) -> Iterator[str]:
    """What is read of the module, which the code calls `module` or `_trt`, also through a variable
    that holds a part of it."""
    roots = {"module": "", "_trt": ""}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = inside(chain_of(node.value), {"module": ""})
            if name:
                roots[node.targets[0].id] = name
    for node in ast.walk(tree):
        name = inside(chain_of(node), roots) if isinstance(node, ast.Attribute) else ""
        if name and name[0].isupper():
            yield name


def inside(chain: list[str], roots: dict[str, str]) -> str:
    """The part of a chain behind the last root, as "Class.member"."""
    for i in reversed(range(len(chain))):
        if chain[i] in roots and (i == 0 or roots[chain[i]] == ""):
            parts = [*filter(None, [roots[chain[i]]]), *chain[i + 1 :]]
            return ".".join(parts[:2])
    return ""


def used() -> set[str]:
    trees = (ast.parse(path.read_text()) for path in ENGINES.glob("*.py"))
    from_code = {name for tree in trees for name in names_in(tree)}
    methods = {"ComputeCapability.__members__"} | {n for n in from_code if n.endswith("__init__")}
    return (from_code - methods) | set(members_used())


def test_what_the_code_uses_is_seen() -> None:
    names = used()
    for name in (
        "Builder",
        "OnnxParser",
        "BuilderFlag.TF32",
        "CausalMaskKind.LOWER_RIGHT",
        "DataType.INT32",
        "ElementWiseOperation.LESS",
        "IAttention.key_value_lengths",
        "IBuilderConfig.set_compute_capability",
        "ILayer.get_output",
        "INetworkDefinition.add_fill",
        "IOptimizationProfile.set_shape",
        "LayerType.ATTENTION_INPUT",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "OnnxParser.parse",
        "ParserError.desc",
    ):
        assert name in names


@pytest.mark.parametrize("version", RECORDED)
def test_names_are_in_the_recorded_version(version: str) -> None:
    missing = used() - recorded(version)
    assert missing == NOT_IN[version]


def test_names_are_in_the_installed_module(rtx: TensorRT) -> None:
    for name in used():
        found: Any = rtx.module
        for part in name.split("."):
            assert hasattr(found, part), name
            found = getattr(found, part)


def test_a_name_that_is_gone_is_noticed() -> None:
    tree = ast.parse("flag = trt.module.BuilderFlag.FP16\nkinds = trt.module.LayerType\nkinds.X")
    names = set(names_in(tree))
    assert names >= {"BuilderFlag.FP16", "LayerType.X"}
    assert "BuilderFlag.FP16" not in recorded("11.4.0")
