"""Formats against what ONNX Runtime computes from their tensors, and against slow loops."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from trtllm_lite.exporter.quantize.formats import (
    FUSED,
    INT4_BLOCK32,
    INT4_BLOCK64,
    INT8_BLOCK64,
    W8A8,
    Format,
    packed_pairs,
)
from trtllm_lite.exporter.quantize.quantizer import (
    RoundToNearest,
    blocked,
    dequantized,
    per_channel,
)
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.short_float import rounded

MICROSOFT = "com.microsoft"
BLOCKS = [INT8_BLOCK64, INT4_BLOCK32, INT4_BLOCK64]
SHAPES = [(7, 576), (5, 100), (33, 64), (3, 40), (1, 1)]


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def encoded(kind: Format, weight: Any, step: int = 2) -> dict[str, Any]:
    """All parts of a weight, its rows given in small pieces."""
    encoder = kind.encoder(weight.shape[0], weight.shape[1], RoundToNearest())
    rows = (weight[i : i + step] for i in range(0, len(weight), step))
    first = np.concatenate([encoder.add("w", r) for r in rows])
    return {kind.parts[0].suffix: first, **encoder.rest()}


def run(node: onnx.NodeProto, constants: dict[str, Any], x: Any) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("kind", FUSED.values(), ids=lambda k: k.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_have_the_shapes_and_types_they_promise(kind: Format, shape: tuple[int, int]) -> None:
    made = encoded(kind, random(*shape))
    apart = [p for p in kind.parts if p.same_bytes_as is None]
    assert set(made) == {p.suffix for p in apart}
    for part in apart:
        assert made[part.suffix].shape == part.shape(*shape), part.suffix
        assert made[part.suffix].dtype == part.dtype, part.suffix
    for part in kind.parts:
        if part.same_bytes_as is not None:
            twin = next(p for p in apart if p.suffix == part.same_bytes_as)
            assert np.prod(part.shape(*shape)) == np.prod(twin.shape(*shape))
            assert part.dtype == twin.dtype


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_mean_what_onnx_runtime_computes(kind: Format, shape: tuple[int, int]) -> None:
    weight = random(*shape)
    n, k = shape
    node = helper.make_node(
        "MatMulNBits",
        ["x", *encoded(kind, weight)],
        ["y"],
        domain=MICROSOFT,
        N=n,
        K=k,
        bits=kind.bits,
        block_size=kind.block,
        # 0 multiplies in float32: what is compared is the meaning of the integers alone.
        accuracy_level=0,
    )
    # The identity reads the weights out, transposed.
    got = run(node, encoded(kind, weight), np.eye(k, dtype=np.float32)).T
    want = dequantized(RoundToNearest().quantize("w", weight, kind.bits, kind.block), kind.block)
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_second_view_is_what_a_lookup_reads(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    parts = encoded(INT8_BLOCK64, weight)
    rows = parts["q8"].reshape(len(weight), -1)
    node = helper.make_node(
        "GatherBlockQuantized",
        ["rows", "x", "scale"],
        ["y"],
        domain=MICROSOFT,
        bits=8,
        block_size=64,
        gather_axis=0,
        quantize_axis=1,
    )
    ids = np.array([[0, shape[0] - 1]], np.int64)
    got = run(node, {"rows": rows, "scale": parts["q8_scale"]}, ids)[..., : shape[1]]
    want = dequantized(RoundToNearest().quantize("w", weight, 8, 64), 64)[ids]
    np.testing.assert_array_equal(got, want)
    assert np.abs(got - weight[ids]).max() <= np.abs(weight).max() / 254 + 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_channels_lie_as_columns(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    made = encoded(W8A8, weight)
    for row in range(shape[0]):
        scale = np.abs(weight[row]).max() / np.float32(127)
        assert made["w8_scale"][row] == scale
        want = [round(float(w / scale)) for w in weight[row]]
        assert np.abs(made["w8"][:, row] - np.array(want)).max() <= 1
        assert np.abs(made["w8"][:, row] * scale - weight[row]).max() <= scale * 0.501


@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from([(8, 64), (4, 32), (4, 64), (4, 16)]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e-6, 1e4, 0.0]),
)
def test_rounding_to_nearest_is_within_half_a_step(
    n: int, k: int, kind: tuple[int, int], seed: int, size: float
) -> None:
    bits, block = kind
    rows = random(n, k, seed=seed) * np.float32(size)
    rows[0, : k // 2] = 0
    made = RoundToNearest().quantize("w", rows, bits, block)
    np.testing.assert_array_equal(rounded(made.scale), made.scale)
    assert made.q.shape == (n, k)
    assert made.scale.shape == made.zero.shape == (n, -(-k // block))
    assert made.q.dtype == made.zero.dtype == np.uint8
    assert int(made.q.max()) < 2**bits
    # A 4-bit zero point is itself rounded, which moves the block's ends by half a step more.
    step = np.repeat(made.scale, block, axis=1)[:, :k]
    # A step that was rounded down, by 2^-12 of it, leaves the ends a little outside.
    allowed = ((0.501 if bits == 8 else 1.001) + 2.0 ** (bits - 12)) * step
    assert (np.abs(dequantized(made, block) - rows) <= allowed).all()
    assert (dequantized(made, block)[rows == 0] == 0).all()


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_pieces_of_rows_make_the_same_bytes(n: int, k: int, step: int, seed: int) -> None:
    weight = random(n, 8 * k, seed=seed)
    for kind in FUSED.values():
        whole, pieces = encoded(kind, weight, n), encoded(kind, weight, step)
        assert {p: a.tobytes() for p, a in whole.items()} == {
            p: a.tobytes() for p, a in pieces.items()
        }


@pytest.mark.parametrize(("bits", "block"), [(8, 32), (4, 32)])
def test_integers_are_those_nearest_on_the_rounded_grid(bits: int, block: int) -> None:
    """Scales are rounded before the integers are chosen, so that only the grid is another."""
    rows = random(20, 96, seed=5)
    made = RoundToNearest().quantize("w", rows, bits, block)
    scale, zero = (np.repeat(x, block, axis=1).astype(np.float64) for x in (made.scale, made.zero))
    want = np.clip(np.rint(rows / scale) + zero, 0, 2**bits - 1)
    assert (made.q != want).mean() < 0.001  # ties of float32


def test_a_block_next_to_zero_is_zero() -> None:
    rows = np.full((1, 64), 1e-13, np.float32)
    rows[0, 32:] = 1
    made = dequantized(RoundToNearest().quantize("w", rows, 8, 32), 32)
    assert not made[0, :32].any()
    np.testing.assert_allclose(made[0, 32:], 1, rtol=2.0**-11)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_too_large_for_a_scale_are_refused_by_name(bits: int) -> None:
    rows = np.full((1, 40), 1e9, np.float32)
    with pytest.raises(UnsupportedError, match=r"a scale of .* \(in layer\.w\)"):
        RoundToNearest().quantize("layer.w", rows, bits, 32)


def test_a_weight_of_zeros_is_zeros() -> None:
    zeros = np.zeros((3, 70), np.float32)
    assert not dequantized(RoundToNearest().quantize("w", zeros, 4, 32), 32).any()
    assert not dequantized(RoundToNearest().quantize("w", zeros, 8, 64), 64).any()
    q, scale = per_channel("w", zeros)
    assert not q.any()
    assert not scale.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", FUSED.values(), ids=lambda k: k.name)
def test_what_is_not_finite_is_refused_by_name(kind: Format, bad: float) -> None:
    weight = random(2, 40)
    weight[1, 3] = bad
    encoder = kind.encoder(2, 40, RoundToNearest())
    with pytest.raises(UnsupportedError, match=r"in layer\.w"):
        encoder.add("layer.w", weight)


def test_pairs_share_a_byte_low_half_first() -> None:
    assert packed_pairs(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]


def test_blocks_are_padded_with_zeros() -> None:
    made = blocked(np.ones((2, 5), np.float32), 4)
    assert made.tolist() == [[[1, 1, 1, 1], [1, 0, 0, 0]]] * 2


def test_four_bits_ask_the_quantizer_and_eight_do_not() -> None:
    class Asked(RoundToNearest):
        def __init__(self) -> None:
            self.calls: list[tuple[str, int, int]] = []

        def quantize(
            self, name: str, rows: Any, bits: int, block: int, scales: str = "float32"
        ) -> Any:
            self.calls.append((name, bits, block))
            return super().quantize(name, rows, bits, block, scales)

    asked = Asked()
    for kind in FUSED.values():
        kind.encoder(2, 64, asked).add("w", random(2, 64))
    assert asked.calls == [("w", 4, 32), ("w", 4, 64)]
