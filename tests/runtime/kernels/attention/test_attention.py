"""Attention over a float32 cache."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

Array = npt.NDArray[Any]

FEW = 24
OFTEN = settings(max_examples=40)


def call(past: tuple[int, ...], tokens: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """The values of a case."""
    return {"past": past, "tokens": tokens} | more


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    dim = draw(st.sampled_from([16, 32, 48, 64, 80]))
    batch = draw(st.integers(1, 3))
    most = draw(st.sampled_from([1, 5, FEW, 70]))
    return call(
        past=tuple(draw(st.integers(0, draw(st.sampled_from([3, 70, 280])))) for _ in range(batch)),
        tokens=tuple(draw(st.integers(1, most)) for _ in range(batch)),
        heads=kv_heads * draw(st.integers(1, 7)),
        kv_heads=kv_heads,
        dim=dim,
        window=draw(st.sampled_from([-1, -1, 1, 7, 64, 300])),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        sinks=draw(st.booleans()),
        rotary=draw(st.sampled_from([0, dim, dim, 8, 14])),
        interleaved=draw(st.booleans()),
        packed=draw(st.booleans()),
        padding=draw(st.integers(0, 3)),
        room=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 9)),
    )


@OFTEN
@given(cases())
@example(call((511, 0, 255), (1, 1, 1), heads=9, kv_heads=3, dim=64, rotary=64))
@example(call((250, 3), (FEW, 2), window=9, sinks=True, rotary=8, interleaved=True))
@example(call((0, 130, 63), (90, 65, 1), heads=9, kv_heads=3, dim=64, rotary=64, packed=False))
@example(call((200,), (100,), window=33, softcap=5.0, sinks=True, dim=80))
@example(call((0,), (130,), heads=16, kv_heads=1, dim=16, window=16))
def test_any_call(calls: Any, given_case: dict[str, Any]) -> None:
    case = calls.case(**given_case)
    data = calls.data(case)
    made = calls.run(calls.node(case, data))
    calls.check(case, data, made)


@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("dim", [16, 96, 112, 128, 192, 256])
def test_head_sizes(calls: Any, dim: int, tokens: int) -> None:
    case = calls.case((65, 0), (tokens, 1), dim=dim, rotary=dim)
    data = calls.data(case)
    calls.check(case, data, calls.run(calls.node(case, data)))


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"window": 5},
        {"rotary": 32, "packed": False},
        {"rotary": 16, "interleaved": True},
        {"softcap": 4.0, "sinks": True},
    ],
    ids=str,
)
def test_it_is_what_onnx_runtime_computes(calls: Any, more: dict[str, Any], tokens: int) -> None:
    """The operator stands in for GroupQueryAttention: attributes must mean the same."""
    case = calls.case((20, 0, 9), (tokens, 1, 2), **more)
    data = calls.data(case)
    ours = calls.run(calls.node(case, data))
    theirs = calls.run(calls.node(case, data, domain="com.microsoft"))
    for b, count in enumerate(case.tokens):
        np.testing.assert_allclose(
            ours.out[b, :count], theirs.out[b, :count], rtol=0, atol=calls.close
        )
        stop = case.past[b] + count
        np.testing.assert_allclose(
            ours.k_cache[b, :, :stop], theirs.k_cache[b, :, :stop], rtol=0, atol=2e-6
        )


@pytest.mark.parametrize("tokens", [2, 40])
def test_one_buffer_as_past_and_present(calls: Any, tokens: int) -> None:
    case = calls.case((70, 300), (tokens, 1), rotary=32)
    data = calls.data(case)
    node = calls.node(case, data)
    copied = calls.run(node)
    k_cache, v_cache = data.k_cache.copy(), data.v_cache.copy()
    out = calls.run_in_place(calls.open_node(node), node, k_cache, v_cache)
    np.testing.assert_array_equal(out, copied.out)
    np.testing.assert_array_equal(k_cache, copied.k_cache)
    np.testing.assert_array_equal(v_cache, copied.v_cache)


def part_of(case: Any, data: Any, rows: slice, first: int, count: int) -> tuple[Any, Any]:
    """Tokens [first, first + count) of some rows of a case whose rows all have as many."""
    part = replace(
        case,
        past=tuple(p + first for p in case.past[rows]),
        tokens=(count,) * len(case.past[rows]),
        padding=0,
    )
    span = (rows, slice(first, first + count))
    fewer = replace(data, q=data.q[span], k=data.k[span], v=data.v[span])
    return part, replace(fewer, k_cache=data.k_cache[rows], v_cache=data.v_cache[rows])


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize("more", [{}, {"window": 20, "sinks": True}, {"softcap": 5.0}], ids=str)
def test_a_token_is_the_same_in_any_company(calls: Any, more: dict[str, Any], kind: Any) -> None:
    """Bit for bit: one token at a time, several, or all 24; beside other rows, or alone. That is
    what makes speculation lossless."""
    case = calls.case((250, 9), (FEW, FEW), heads=6, rotary=32, room=0, **more)
    data = calls.data(case)
    scales = calls.kv_scales(case, data) if kind is np.int8 else None

    def run_in_chunks(sizes: tuple[int, ...], rows: slice = slice(None)) -> Array:
        whole = calls.node(*part_of(case, data, rows, 0, 1), kind, scales)
        session = calls.open_node(whole, 2)
        k_cache, v_cache = (whole.feeds[f"past_{p}"].copy() for p in ("key", "value"))
        outs, first = [], 0
        for size in sizes:
            node = calls.node(*part_of(case, data, rows, first, size), kind, scales)
            outs.append(calls.run_in_place(session, node, k_cache, v_cache))
            first += size
        return np.concatenate(
            [
                *(o.reshape(len(o), -1) for o in outs),
                k_cache.reshape(len(k_cache), -1),
                v_cache.reshape(len(v_cache), -1),
            ],
            axis=1,
        )

    one_by_one = run_in_chunks((1,) * FEW)
    for sizes in ((FEW,), (7, 17), (1, 4, 4, 15)):
        np.testing.assert_array_equal(run_in_chunks(sizes), one_by_one)
    np.testing.assert_array_equal(run_in_chunks((5, 19), slice(1, 2)), one_by_one[1:2])


def test_a_long_row_is_the_same_beside_others_and_on_more_threads(calls: Any) -> None:
    case = calls.case((30, 0, 100), (90, 90, 90), heads=6, rotary=32)
    data = calls.data(case)
    node = calls.node(case, data)
    made = calls.run(node)
    np.testing.assert_array_equal(calls.run(node, threads=2).out, made.out)
    alone = calls.run(calls.node(*part_of(case, data, slice(1, 2), 0, 90)))
    np.testing.assert_array_equal(alone.out, made.out[1:2])


@pytest.mark.parametrize("tokens", [4, 40])
def test_what_is_not_finite_stays_in_its_row(calls: Any, tokens: int) -> None:
    case = calls.case((9, 9), (tokens, tokens))
    data = calls.data(case)
    before = calls.run(calls.node(case, data)).out
    for part in (data.q, data.k, data.v):
        part[1] = np.nan
    after = calls.run(calls.node(case, data)).out
    np.testing.assert_array_equal(after[0], before[0])
    assert np.isnan(after[1]).all()


@pytest.mark.parametrize("shape", [(0, 1), (0, 30), (2, 0)])
def test_nothing_to_compute(calls: Any, shape: tuple[int, int]) -> None:
    batch, seq = shape
    case = calls.case((3,) * max(1, batch), (1,) * max(1, batch), rotary=32)
    node = calls.node(case, calls.data(case))
    feeds = {n: a[:batch] if a.ndim else a for n, a in node.feeds.items()}
    feeds["query"] = np.zeros((batch, seq, feeds["query"].shape[2]), np.float32)
    feeds["query_seqlens"] = np.zeros(batch, np.int32)
    feeds["seqlens_k"] = np.full(batch, 2, np.int32)
    out, k_cache, _ = calls.open_node(node).run(None, feeds)
    assert out.shape == (batch, seq, 128)
    np.testing.assert_array_equal(k_cache, feeds["past_key"])


@pytest.mark.parametrize("seq", [4, 40])
def test_a_row_without_tokens(calls: Any, seq: int) -> None:
    """Its past may even be empty; its neighbours do not notice."""
    case = calls.case((5, 7, 0), (seq, 0, 0))
    data = calls.data(case)
    calls.check(case, data, calls.run(calls.node(case, data)))
