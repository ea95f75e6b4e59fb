"""What the attention operators refuse, in words."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]


def call(past: tuple[int, ...], tokens: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """The values of a case."""
    return {"past": past, "tokens": tokens} | more


POSITIONS = 1700


def grow(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, Array]], None]:
    def change(feeds: dict[str, Array]) -> None:
        feeds[name] = np.zeros(shape, feeds[name].dtype)

    return change


def fill(name: str, value: int) -> Callable[[dict[str, Array]], None]:
    def change(feeds: dict[str, Array]) -> None:
        feeds[name] = np.full_like(feeds[name], value)

    return change


OUTSIDE = "seqlens_k, query_seqlens: outside the cache or the row"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (grow("query", (2, 3, 128)), "query.*wrong width"),
        (grow("query", (1, 3, 256)), "past_key and past_value do not fit"),
        (grow("past_value", (2, 2, 9, 32)), "past_key and past_value do not fit"),
        (grow("past_key", (2, 4, 11, 32)), "past_key and past_value do not fit"),
        (grow("seqlens_k", (1,)), "seqlens_k: wrong size"),
        (grow("query_seqlens", (3,)), "query_seqlens: wrong size"),
        (fill("seqlens_k", 11), OUTSIDE),
        (fill("seqlens_k", 2**31 - 1), OUTSIDE),
        (fill("seqlens_k", 1), OUTSIDE),
        (fill("seqlens_k", -(2**31)), OUTSIDE),
        (fill("query_seqlens", 4), OUTSIDE),
        (fill("query_seqlens", -1), OUTSIDE),
    ],
)
def test_inputs_that_do_not_fit(
    calls: Any,
    change: Callable[[dict[str, Array]], None],
    said: str,
) -> None:
    case = calls.case((5, 5), (3, 3), room=3)
    node = calls.node(case, calls.data(case))
    feeds = dict(node.feeds)
    change(feeds)
    with pytest.raises(Exception, match=said):
        calls.open_node(node).run(None, feeds)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("key", (2, 2, 64), "key: wrong size"),
        ("value", (2, 3, 32), "value: wrong size"),
        ("head_sink", (3,), "head_sink: wrong size"),
        ("cos", (POSITIONS, 15), "cos_cache, sin_cache"),
        ("sin", (POSITIONS,), "cos_cache, sin_cache"),
        ("position_ids", (2, 3), "position_ids.*: not supported"),
        ("attention_bias", (2, 1, 3, 8), "attention_bias.*: not supported"),
        ("q_norm_weight", (32,), "q_norm_weight.*: not supported"),
        ("k_norm_weight", (32,), "k_norm_weight: not supported"),
    ],
)
def test_optional_inputs_that_do_not_fit(
    calls: Any, name: str, shape: tuple[int, ...], said: str
) -> None:
    case = calls.case((5, 5), (3, 3), rotary=32, sinks=True, packed=False)
    node = calls.node(case, calls.data(case))
    kind = np.int64 if name == "position_ids" else np.float32
    inputs = [(n, np.zeros(shape, kind) if n == name else a) for n, a in node.inputs]
    wrong = replace(node, inputs=inputs)
    with pytest.raises(Exception, match=said):
        calls.run(wrong)


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("cos", "cos_cache, sin_cache: missing"),
        ("sin", "cos_cache, sin_cache: missing"),
        ("value", "query, key and value do not fit"),
        ("key", "packed query, key and value: wrong width"),
    ],
)
def test_inputs_that_are_missing(calls: Any, left_out: str, said: str) -> None:
    case = calls.case((5, 5), (3, 3), rotary=32, packed=False)
    node = calls.node(case, calls.data(case))
    inputs = [(n, None if n == left_out else a) for n, a in node.inputs]
    with pytest.raises(Exception, match=said):
        calls.run(replace(node, inputs=inputs))


def test_int8_needs_its_scales(calls: Any) -> None:
    case = calls.case((5,), (3,))
    data = calls.data(case)
    scales = calls.kv_scales(case, data)
    node = calls.node(case, data, np.int8, scales)
    for name in ("k_scale", "v_scale"):
        without = [(n, None if n == name else a) for n, a in node.inputs]
        with pytest.raises(Exception, match="an int8 cache needs its scales"):
            calls.run(replace(node, inputs=without))
        short = [(n, a[:1] if n == name and a is not None else a) for n, a in node.inputs]
        with pytest.raises(Exception, match=f"{name}: wrong size"):
            calls.run(replace(node, inputs=short))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (call((5,), (3,), dim=24), "head size: allowed are multiples of 16"),
        (call((5,), (3,), rotary=48), "cos_cache: wider than a head"),
        (call((POSITIONS - 1,), (2,), rotary=32), "a position has no rotation"),
    ],
)
def test_what_it_has_no_kernel_for(calls: Any, values: dict[str, Any], said: str) -> None:
    case = calls.case(**values)
    with pytest.raises(Exception, match=said):
        calls.run(calls.node(case, calls.data(case)))


@pytest.mark.parametrize("heads", [(0, 1), (3, 2), (2, 0), (-2, 1), (2, -1)])
def test_heads_that_do_not_go_together(calls: Any, heads: tuple[int, int]) -> None:
    case = calls.case((5,), (3,))
    node = calls.node(case, calls.data(case))
    attributes = dict(node.attributes) | {"num_heads": heads[0], "kv_num_heads": heads[1]}
    with pytest.raises(Exception, match="num_heads must be a multiple of kv_num_heads"):
        calls.open_node(replace(node, attributes=attributes))
