"""Attention of many tokens where keys that lie far behind are codes of eight bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

Array = npt.NDArray[Any]

NEAR = 512
"""Tiles of 64 keys that begin so many tokens before the query's tile are far from it."""
FLAGS = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
pytestmark = pytest.mark.skipif(
    not {"avx512_bf16", "avx512vbmi"} <= set(FLAGS),
    reason="this processor has no AVX512-BF16 or no AVX512-VBMI",
)


def error(made: Array, wanted: Array) -> float:
    """Root mean square of the difference, in that of what is wanted."""
    return float(np.sqrt(np.mean((made - wanted) ** 2) / np.mean(wanted**2)))


def near_only(case: Any, data: Any) -> Any:
    """What far keys would be seen as if they were none: their values and keys are zeros."""
    k_cache, v_cache = data.k_cache.copy(), data.v_cache.copy()
    for cache in (k_cache, v_cache):
        cache[:, :, : case.past[0] - NEAR - 64] = 0
    return replace(data, k_cache=k_cache, v_cache=v_cache)


@settings(max_examples=12)
@given(
    past=st.integers(NEAR, 1500),
    tokens=st.integers(25, 90),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    window=st.sampled_from([-1, -1, 100, 700, 1100]),
    sinks=st.booleans(),
)
@example(past=1400, tokens=90, kv_heads=1, group=3, dim=64, window=-1, sinks=False)
@example(past=1024, tokens=64, kv_heads=2, group=1, dim=256, window=800, sinks=True)
def test_any_call_is_near_the_float64_loop(calls: Any, sinks: bool, **values: Any) -> None:
    """Steps of eight bits are about 1/40 of a key's or a query's elements here, which moves scores
    by about a hundredth of their size: results, sums of many, by little more."""
    kv_heads = values["kv_heads"]
    case = calls.case(
        (values["past"],),
        (values["tokens"],),
        heads=kv_heads * values["group"],
        kv_heads=kv_heads,
        dim=values["dim"],
        window=values["window"],
        sinks=sinks,
    )
    data = calls.data(case)
    made = calls.run(calls.node(case, data, bfloat16=1)).out
    assert error(made, calls.reference(case, data).out) < 0.03


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8])
def test_codes_are_used_far_behind_alone(calls: Any, kind: Any) -> None:
    """Errors of the far part, over every cache, are larger than bfloat16's and no larger than eight
    bits'; up to the distance from which keys are far there is no such part."""
    errors = []
    for past in (NEAR - 64, 1400):
        case = calls.case((past,), (64,), heads=6, dim=64)
        data = calls.data(case)
        scales = calls.kv_scales(case, data) if kind is np.int8 else None
        plain = calls.run(calls.node(case, data, kind, scales, bfloat16=0))
        made = calls.run(calls.node(case, data, kind, scales, bfloat16=1))
        errors.append(error(made.out, plain.out))
    assert 1e-4 < errors[0] < 7e-3 < errors[1] < 0.02


def test_heads_of_more_than_128_elements_have_none(calls: Any) -> None:
    for dim, least, most in ((128, 7e-3, 0.02), (144, 1e-4, 7e-3)):
        case = calls.case((1400,), (64,), heads=2, kv_heads=1, dim=dim)
        data = calls.data(case)
        made = calls.run(calls.node(case, data, bfloat16=1)).out
        assert least < error(made, calls.run(calls.node(case, data, bfloat16=0)).out) < most


def test_far_keys_count(calls: Any) -> None:
    """What is far is most of the result here: left out it would be another."""
    case = calls.case((1400,), (64,), heads=3, kv_heads=1, dim=64)
    data = calls.data(case)
    made = calls.run(calls.node(case, data, bfloat16=1)).out
    assert error(calls.reference(case, near_only(case, data)).out, made) > 0.5


@pytest.mark.parametrize(("window", "sinks"), [(-1, False), (700, True)])
@pytest.mark.parametrize("cut", [30, 50, 64])
def test_a_prompt_may_be_cut_anywhere(calls: Any, window: int, sinks: bool, cut: int) -> None:
    """To the last bit: whether a tile is far from a query depends on their positions alone."""
    values = {"heads": 6, "kv_heads": 2, "dim": 64, "window": window, "sinks": sinks}
    case = calls.case((1111,), (97,), **values)
    data = calls.data(case)
    whole = calls.run(calls.node(case, data, bfloat16=1)).out
    parts, caches = [], (data.k_cache, data.v_cache)
    for first, end in ((0, cut), (cut, 97)):
        part = calls.case((1111 + first,), (end - first,), room=3 + 97 - end, **values)
        its = replace(data, q=data.q[:, first:end], k=data.k[:, first:end], v=data.v[:, first:end])
        its = replace(its, k_cache=caches[0], v_cache=caches[1])
        made = calls.run(calls.node(part, its, bfloat16=1))
        parts.append(made.out)
        caches = (made.k_cache, made.v_cache)
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole)


def test_what_keys_have_in_common_takes_no_bits(calls: Any) -> None:
    """An element that is large in all keys would leave the others a few steps. In float16 and the
    float64 loop it changes no weight; bfloat16, for what is near, is exact for this one."""
    case = calls.case((1400,), (64,), heads=3, kv_heads=1, dim=64)
    data = calls.data(case)
    k_cache, k = data.k_cache.copy(), data.k.copy()
    k_cache[..., 5] = k[..., 5] = 64.0
    data = replace(data, k=k, k_cache=k_cache)
    made = calls.run(calls.node(case, data, bfloat16=1)).out
    assert error(made, calls.reference(case, data).out) < 0.03


def test_a_rising_score_lowers_what_came_before(calls: Any) -> None:
    """Far tiles whose scores grow by more than weights are allowed to."""
    case = calls.case((1400,), (64,), heads=3, kv_heads=1, dim=64)
    data = calls.data(case)
    rising = np.linspace(0, 2, case.capacity, dtype=np.float32)[None, None, :, None]
    data = replace(data, q=data.q * 2, k_cache=data.k_cache * rising)
    made = calls.run(calls.node(case, data, bfloat16=1)).out
    assert error(made, calls.reference(case, data).out) < 0.05


@pytest.mark.parametrize("at", [100, 1300])
def test_a_key_that_is_no_number_shows(calls: Any, at: int) -> None:
    """Far or near: queries that see it have no result, whatever its value is; heads that read
    others have theirs."""
    case = calls.case((1400,), (64,), heads=2, kv_heads=2, dim=64)
    data = calls.data(case)
    before = calls.run(calls.node(case, data, bfloat16=1)).out
    data.k_cache[0, 0, at, 7] = np.nan
    after = calls.run(calls.node(case, data, bfloat16=1)).out
    assert np.isnan(after[..., :64]).all()
    np.testing.assert_array_equal(after[..., 64:], before[..., 64:])
