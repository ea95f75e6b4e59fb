"""Attention of many tokens that rounds what it multiplies to bfloat16."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

Array = npt.NDArray[Any]

FEW = 24
HALF_STEP = 2.0**-8
"""Relative, of a number with eight binary digits."""
LOG2_E = np.float32(1.44269504088896341)
FLAGS = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
HERE = {"avx512_bf16", "avx512vbmi"} <= set(FLAGS)
needs_bfloat16 = pytest.mark.skipif(
    not HERE, reason="this processor has no AVX512-BF16 or no AVX512-VBMI"
)


def call(past: tuple[int, ...], tokens: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """The values of a case."""
    return {"past": past, "tokens": tokens} | more


def rounded(x: Array) -> Array:
    """To the nearest bfloat16, the even one of two; NaN stays."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), x, kept.astype(np.uint32).view(np.float32))


def with_rounded_query(case: Any, data: Any) -> Any:
    """Queries are rounded when they have been multiplied with the scale and log2 e."""
    scale = np.float32(case.scale)
    q = rounded(data.q * scale * LOG2_E).astype(np.float64)
    return replace(data, q=q / (float(scale) * float(LOG2_E)))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    others = draw(st.lists(st.integers(1, 90), max_size=2))
    tokens = (draw(st.integers(FEW + 1, 90)), *others)
    return call(
        past=tuple(draw(st.integers(0, draw(st.sampled_from([3, 70, 280])))) for _ in tokens),
        tokens=tokens,
        heads=kv_heads * draw(st.integers(1, 7)),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([16, 32, 48, 64, 80, 128])),
        window=draw(st.sampled_from([-1, -1, 1, 7, 64, 300])),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        sinks=draw(st.booleans()),
        packed=draw(st.booleans()),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 9)),
    )


@needs_bfloat16
@settings(max_examples=30)
@given(cases())
@example(call((0, 130, 63), (90, 65, 1), heads=9, kv_heads=3, dim=64))
@example(call((200,), (100,), window=33, softcap=5.0, sinks=True, dim=80))
def test_any_call(calls: Any, given_case: dict[str, Any]) -> None:
    """Against the float64 loop over the very queries, keys and values that are multiplied: what is
    left is the rounding of the weights, each by at most half a step, which moves the mix and the
    sum it is divided by. A tenth more for the exponentials."""
    case = calls.case(**given_case)
    data = calls.data(case)
    made = calls.run(calls.node(case, data, bfloat16=1))
    stored = (rounded(made.k_cache), rounded(made.v_cache))
    wanted = calls.reference(case, with_rounded_query(case, data), stored)
    allowed = 2.2 * HALF_STEP * float(np.nanmax(np.abs(stored[1]))) + calls.close
    np.testing.assert_allclose(made.out, wanted.out, rtol=0, atol=allowed)
    for b, tokens in enumerate(case.tokens):
        assert not made.out[b, tokens:].any(), "padding must come out as zeros"


@needs_bfloat16
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_near_float32(calls: Any, kind: Any, interleaved: bool) -> None:
    """Over every cache, with rotation: errors of a few thousandths of the results, and the caches
    hold the same."""
    case = calls.case((70, 0), (90, 30), heads=6, dim=64, rotary=64, interleaved=interleaved)
    data = calls.data(case)
    scales = calls.kv_scales(case, data) if kind is np.int8 else None
    plain = calls.run(calls.node(case, data, kind, scales, bfloat16=0))
    made = calls.run(calls.node(case, data, kind, scales, bfloat16=1))
    error = float(np.sqrt(np.mean((made.out - plain.out) ** 2) / np.mean(plain.out**2)))
    assert 1e-4 < error < 1e-2
    np.testing.assert_array_equal(made.k_cache, plain.k_cache)
    np.testing.assert_array_equal(made.v_cache, plain.v_cache)


@pytest.mark.parametrize(("tokens", "changes"), [(FEW, False), (FEW + 1, HERE)])
def test_where_it_is_used(calls: Any, tokens: int, changes: bool) -> None:
    """For many tokens, on processors that multiply it; a graph without the attribute has none."""
    case = calls.case((70, 9), (tokens, 3), rotary=32)
    data = calls.data(case)
    without = calls.run(calls.node(case, data)).out
    allowed = calls.run(calls.node(case, data, bfloat16=1)).out
    np.testing.assert_array_equal(calls.run(calls.node(case, data, bfloat16=0)).out, without)
    assert np.array_equal(allowed, without) is not changes


def test_a_row_is_the_same_beside_others_and_on_more_threads(calls: Any) -> None:
    case = calls.case((30, 0, 100), (90, 90, 90), heads=6, rotary=32)
    data = calls.data(case)
    node = calls.node(case, data, bfloat16=1)
    made = calls.run(node)
    np.testing.assert_array_equal(calls.run(node, threads=2).out, made.out)
    own = slice(1, 2)
    one = replace(case, past=case.past[own], tokens=case.tokens[own])
    its = replace(data, q=data.q[own], k=data.k[own], v=data.v[own])
    its = replace(its, k_cache=data.k_cache[own], v_cache=data.v_cache[own])
    alone = calls.run(calls.node(one, its, bfloat16=1))
    np.testing.assert_array_equal(alone.out, made.out[own])


def test_what_is_not_finite_stays_in_its_row(calls: Any) -> None:
    case = calls.case((9, 9), (40, 40))
    data = calls.data(case)
    before = calls.run(calls.node(case, data, bfloat16=1)).out
    for part in (data.q, data.k, data.v):
        part[1] = np.nan
    after = calls.run(calls.node(case, data, bfloat16=1)).out
    np.testing.assert_array_equal(after[0], before[0])
    assert np.isnan(after[1]).all()


@needs_bfloat16
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_scores_of_any_size(calls: Any, size: float) -> None:
    """Weights that are all alike, and weights of which few are left: a maximum that rises late
    lowers what was summed up before."""
    case = calls.case((300,), (60,), dim=64)
    data = calls.data(case)
    rising = np.linspace(0, 1, case.capacity, dtype=np.float32)[None, None, :, None]
    data = replace(data, q=data.q * size, k_cache=data.k_cache * rising)
    made = calls.run(calls.node(case, data, bfloat16=1))
    stored = (rounded(made.k_cache), rounded(made.v_cache))
    wanted = calls.reference(case, with_rounded_query(case, data), stored)
    # Scores of size x 10 are float32's to a few millionths, which moves their weights by as much.
    allowed = (2.2 * HALF_STEP + 4e-5 * size) * float(np.nanmax(np.abs(stored[1])))
    np.testing.assert_allclose(made.out, wanted.out, rtol=0, atol=allowed)


def test_another_value_is_refused(calls: Any) -> None:
    case = calls.case((9,), (30,))
    with pytest.raises(Exception, match="bfloat16: allowed are 0 and 1"):
        calls.run(calls.node(case, calls.data(case), bfloat16=2))
