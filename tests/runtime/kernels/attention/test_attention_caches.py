"""Attention over float16 and int8 caches."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]


def call(past: tuple[int, ...], tokens: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """The values of a case."""
    return {"past": past, "tokens": tokens} | more


CACHED = [
    call((30, 0), (3, 1), rotary=32),
    call((300, 9), (24, 5), rotary=32, heads=6, packed=False),
    call((70, 0), (50, 30), rotary=16, interleaved=True, window=40),
    call((0, 90), (70, 1), sinks=True, softcap=5.0, dim=80, heads=8),
]


def norm(x: Array) -> float:
    """Largest length of a head's vector."""
    return float(np.nanmax(np.linalg.norm(x.astype(np.float64), axis=-1)))


def mixing_error(calls: Any, case: Any, data: Any, key_error: float, value_error: float) -> float:
    """What errors of keys (length of a vector) and of values (an element) do to a result.

    |dscore| <= scale |q| |dk| (Cauchy-Schwarz; a softcap only shrinks it); each weight then is
    wrong by a factor of at most exp(2 |dscore|).
    """
    score = case.scale * norm(data.q) * key_error
    largest = float(np.nanmax(np.abs(np.concatenate([data.v.ravel(), data.v_cache.ravel()]))))
    return float(np.expm1(2 * score)) * largest + value_error + float(calls.close)


@pytest.mark.parametrize("values", CACHED, ids=str)
def test_float16_caches(calls: Any, values: dict[str, Any]) -> None:
    case = calls.case(**values)
    data = calls.data(case)
    made = calls.run(calls.node(case, data, np.float16))
    plain = calls.run(calls.node(case, data))
    half = 2.0**-11  # half a unit of the last place, relative
    longest = max(norm(data.k), norm(data.k_cache))
    largest = float(np.nanmax(np.abs(plain.v_cache)))
    allowed = mixing_error(calls, case, data, longest * half, largest * half)
    assert 0 < np.abs(made.out - plain.out).max() <= allowed
    for cache, exact in ((made.k_cache, plain.k_cache), (made.v_cache, plain.v_cache)):
        assert cache.dtype == np.float16
        np.testing.assert_array_equal(cache, exact.astype(np.float16))
    wanted = calls.reference(case, data, (made.k_cache, made.v_cache))
    np.testing.assert_allclose(made.out, wanted.out, rtol=0, atol=calls.close)


@pytest.mark.parametrize("values", CACHED, ids=str)
def test_int8_caches(calls: Any, values: dict[str, Any]) -> None:
    case = calls.case(**values)
    data = calls.data(case)
    scales = calls.kv_scales(case, data)
    made = calls.run(calls.node(case, data, np.int8, scales))
    plain = calls.run(calls.node(case, data))
    allowed = mixing_error(calls, case, data, norm(scales[0]) / 2, float(scales[1].max()) / 2)
    assert 0 < np.abs(made.out - plain.out).max() <= allowed
    pairs = ((made.k_cache, plain.k_cache, scales[0]), (made.v_cache, plain.v_cache, scales[1]))
    for cache, exact, scale in pairs:
        assert cache.dtype == np.int8
        np.testing.assert_array_equal(cache, calls.quantized(exact, scale).astype(np.int8))


@pytest.mark.parametrize("values", CACHED, ids=str)
def test_int8_caches_are_read_with_their_scales(calls: Any, values: dict[str, Any]) -> None:
    """Against the float64 loop over the very values that the codes stand for: tight."""
    case = calls.case(**values)
    data = calls.data(case)
    scales = calls.kv_scales(case, data)
    made = calls.run(calls.node(case, data, np.int8, scales))
    stored = tuple(c * s[None] for c, s in zip((made.k_cache, made.v_cache), scales, strict=True))
    wanted = calls.reference(case, data, stored)
    np.testing.assert_allclose(made.out, wanted.out, rtol=0, atol=calls.close)
