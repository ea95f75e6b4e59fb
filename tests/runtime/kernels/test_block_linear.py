"""BlockLinear against float64, with the error that the rounding of activations allows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.native_layout import Packing

Array = npt.NDArray[Any]
MakeNode = Callable[..., Any]
MakeWeight = Callable[..., Any]
Run = Callable[[Any], list[Array]]

FEW = 24
EPS = 2.0**-24
ACTIVATIONS = (0, 1, 2)
OFTEN = settings(max_examples=25)


@pytest.fixture(scope="module")
def linear(make_node: MakeNode, run_node: Run) -> Callable[..., Array]:
    """x through the operator."""

    def linear(x: Array, weight: Any, bias: Array | None = None, activation: int = 0) -> Array:
        return run_node(linear_node(make_node, x, weight, bias, activation))[0]

    return linear


def linear_node(
    make_node: MakeNode, x: Array, weight: Any, bias: Array | None = None, activation: int = 0
) -> Any:
    return make_node(
        "BlockLinear",
        [("x", x), *weight.tensors, ("bias", bias)],
        frozenset({"codes", "scale", "zero", "bias"}),
        weight.attributes | {"activation": activation},
    )


def activated(x: Array, activation: int) -> Array:
    if activation == 1:
        return np.asarray(x / (1 + np.exp(-x)))
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)))


def reference(x: Array, weight: Any, bias: Array | None, activation: int) -> Array:
    y = np.asarray(x.astype(np.float64) @ weight.values.T)
    if bias is not None:
        y = y + bias
    if activation == 0:
        return y
    gate, up = np.split(y, 2, axis=-1)
    return np.asarray(activated(gate, activation) * up)


def rounding_bound(x: Array, weight: Any, terms: int) -> Array:
    """Largest error of a product before the activation, [.., n].

    A block's activations are rounded to multiples of amax / 127, and with a second term to the
    254th part of that: each is wrong by half a step at most. Sums of a block are exact integers;
    they are scaled and added up in float32, a few roundings a block.
    """
    p = weight.packing
    wide = np.zeros((*x.shape[:-1], p.blocks * p.block))
    wide[..., : p.k] = np.abs(x)
    steps = wide.reshape(*x.shape[:-1], p.blocks, p.block).max(-1) / 127 / 254 ** (terms - 1)
    half = np.repeat(steps / 2 * 1.01, p.block, axis=-1)[..., : p.k]
    rounded = half @ np.abs(weight.values).T
    summed = (np.abs(x) + half) @ weight.magnitude.T
    return np.asarray(rounded + (2 * p.blocks + 8) * EPS * summed)


def allowed(x: Array, weight: Any, bias: Array | None, activation: int, terms: int) -> Array:
    """Largest error of the operator. No slope of SiLU or tanh-GELU is above 1.13; they are computed
    with a relative error of about 1e-6."""
    bound = rounding_bound(x, weight, terms)
    plain = reference(x, weight, bias, 0)
    bound = bound + 4 * EPS * np.abs(plain)
    if activation == 0:
        return bound
    (gate, up), (gate_off, up_off) = (np.split(v, 2, axis=-1) for v in (plain, bound))
    value = np.abs(activated(gate, activation))
    gate_off = 1.13 * gate_off + 2e-6 * (1 + np.abs(gate))
    return np.asarray(gate_off * (np.abs(up) + up_off) + value * up_off)


def values(shape: tuple[int, ...], seed: int) -> Array:
    """Activations as models have them: a few channels far larger than the rest."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    x[..., rng.integers(0, shape[-1], 2)] *= 20
    return x.astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Packing, int, bool]:
    activation = draw(st.sampled_from(ACTIVATIONS))
    n = draw(st.integers(1, 50)) * (2 if activation else 1)
    k = draw(st.integers(1, 300))
    bits, block = draw(st.sampled_from([4, 8])), draw(st.sampled_from([32, 64, 128]))
    return Packing(n, k, bits, block, activation > 0), activation, draw(st.booleans())


@OFTEN
@given(cases(), st.integers(1, 2), st.integers(1, 40), st.integers(0, 99))
@example((Packing(96, 576, 8, 64), 0, False), 1, 1, 0)
@example((Packing(96, 576, 4, 32), 0, True), 2, 25, 0)
@example((Packing(34, 40, 4, 64, gated=True), 2, True), 1, 24, 0)
def test_error_is_within_the_rounding_of_activations(
    linear: Callable[..., Array],
    random_weight: MakeWeight,
    case: tuple[Packing, int, bool],
    batch: int,
    tokens: int,
    seed: int,
) -> None:
    packing, activation, with_bias = case
    weight = random_weight(packing, seed)
    x = values((batch, tokens, packing.k), seed)
    bias = None
    if with_bias:
        bias = np.random.default_rng(seed).standard_normal(packing.n).astype(np.float32)
    y = linear(x, weight, bias, activation)
    off = np.abs(y - reference(x, weight, bias, activation))
    terms = 2 if tokens <= FEW else 1
    assert y.dtype == np.float32
    assert (off <= allowed(x, weight, bias, activation, terms)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_few_tokens_are_rounded_finely(
    linear: Callable[..., Array], random_weight: MakeWeight, bits: int
) -> None:
    weight = random_weight(Packing(64, 512, bits, 64))
    x = np.random.default_rng(0).standard_normal((2, FEW + 1, 512)).astype(np.float32)
    exact = reference(x, weight, None, 0)

    def error(tokens: int) -> float:
        y = linear(x[:, :tokens], weight)
        return float(np.linalg.norm(y - exact[:, :tokens]) / np.linalg.norm(exact[:, :tokens]))

    assert error(1) < 5e-5
    assert error(FEW) < 5e-5
    assert 1e-3 < error(FEW + 1) < 1e-2


@pytest.mark.parametrize(("bits", "activation"), [(8, 0), (4, 0), (8, 1), (4, 2)])
def test_a_row_depends_on_nothing_else(
    linear: Callable[..., Array], random_weight: MakeWeight, bits: int, activation: int
) -> None:
    """Bit for bit, wherever it stands and whatever is computed with it."""
    weight = random_weight(Packing(70, 200, bits, 32, activation > 0))
    x = values((5, FEW, 200), 3)
    whole = linear(x, weight, None, activation)
    for tokens in (1, 2, 3, 5, 7, 23):
        part = linear(x[:, :tokens], weight, None, activation)
        np.testing.assert_array_equal(part, whole[:, :tokens])
    np.testing.assert_array_equal(linear(x[3:4, 9:10], weight, None, activation)[0, 0], whole[3, 9])
    many = values((3, 50, 200), 4)
    fast = linear(many, weight, None, activation)
    np.testing.assert_array_equal(linear(many[1:2], weight, None, activation), fast[1:2])
    np.testing.assert_array_equal(linear(many[:, 20:], weight, None, activation), fast[:, 20:])


def test_few_tokens_can_be_rounded_like_many(
    make_node: MakeNode, run_node: Run, random_weight: MakeWeight
) -> None:
    """With `exact_tokens` 0 a row is, bit for bit, what it is among many."""
    weight = random_weight(Packing(70, 200, 8, 32))
    x = values((1, 40, 200), 7)
    many = run_node(linear_node(make_node, x, weight))[0]
    few = linear_node(make_node, x[:, :3], weight)
    fast = make_node(few.op, few.inputs, few.constants, dict(few.attributes) | {"exact_tokens": 0})
    np.testing.assert_array_equal(run_node(fast)[0], many[:, :3])
    assert (run_node(few)[0] != many[:, :3]).any()


def test_threads_do_not_change_a_bit(
    open_node: Callable[..., Any], make_node: MakeNode, random_weight: MakeWeight
) -> None:
    """Enough work to be dealt out: rows in blocks of 192, panels in parts."""
    weight = random_weight(Packing(260, 256, 8, 64))
    for shape in ((1, 450, 256), (7, 3, 256)):
        node = linear_node(make_node, values(shape, 5), weight)
        one, two = (open_node(node, threads).run(None, node.feeds)[0] for threads in (1, 2))
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("tokens", [3, 30])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row_and_shows(
    linear: Callable[..., Array], random_weight: MakeWeight, bad: float, bits: int, tokens: int
) -> None:
    weight = random_weight(Packing(40, 100, bits, 32))
    clean = values((2, tokens, 100), 6)
    before = linear(clean, weight)
    for place in (0, 31, 50, 99):
        x = clean.copy()
        x[1, 1, place] = bad
        y = linear(x, weight)
        assert not np.isfinite(y[1, 1]).any()
        y[1, 1] = before[1, 1]
        np.testing.assert_array_equal(y, before)


@pytest.mark.parametrize("tokens", [2, 30])
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_what_is_next_to_zero(
    linear: Callable[..., Array], random_weight: MakeWeight, bits: int, tokens: int
) -> None:
    weight = random_weight(Packing(40, 100, bits, 32))
    bias = np.linspace(-2, 2, 40, dtype=np.float32)
    x = np.zeros((1, tokens, 100), np.float32)
    np.testing.assert_array_equal(linear(x, weight, bias)[0], np.tile(bias, (tokens, 1)))
    assert not linear(x, weight).any()
    for tiny in (1e-45, 1e-40, 1e-37, 1e-35):
        x[0, 0, ::3] = tiny
        assert np.abs(linear(x, weight)).max() <= tiny * 100 * 16


def test_ranks(linear: Callable[..., Array], random_weight: MakeWeight) -> None:
    weight = random_weight(Packing(48, 64, 8, 64))
    x = values((3, 4, 64), 7)
    y = linear(x, weight)
    assert y.shape == (3, 4, 48)
    np.testing.assert_array_equal(linear(x.reshape(12, 64), weight), y.reshape(12, 48))
    np.testing.assert_array_equal(linear(x[0, 0], weight), y[0, 0])
    np.testing.assert_array_equal(linear(x[:, :, None], weight), y[:, :, None])


@pytest.mark.parametrize("shape", [(0, 3, 64), (3, 0, 64), (0, 64)])
def test_nothing_to_compute(
    linear: Callable[..., Array], random_weight: MakeWeight, shape: tuple[int, ...]
) -> None:
    weight = random_weight(Packing(48, 64, 8, 64))
    assert linear(np.zeros(shape, np.float32), weight).shape == (*shape[:-1], 48)


# What it refuses


def test_inputs_of_another_width(linear: Callable[..., Array], random_weight: MakeWeight) -> None:
    with pytest.raises(Exception, match="its last dimension is not k"):
        linear(np.zeros((1, 2, 63), np.float32), random_weight(Packing(48, 64, 8, 64)))


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"bits": 5}, "bits: allowed are 4 and 8"),
        ({"block_size": 16}, "block_size: allowed are 32, 64, 128"),
        ({"block_size": 0}, "block_size: allowed are 32, 64, 128"),
        ({"activation": 3}, r"activation: allowed are 0 \(none\)"),
        ({"activation": -1}, r"activation: allowed are 0 \(none\)"),
        ({"n": 0}, "n and k"),
        ({"k": -64}, "n and k"),
        ({"n": 2**40, "k": 2**40}, "n and k"),
        ({"n": 47, "activation": 1}, "gates and ups"),
        ({"n": 70}, "codes: wrong size"),
        ({"k": 65}, "codes: wrong size"),
        ({"block_size": 32}, "scale: wrong size"),
        ({"bits": 4, "k": 128, "block_size": 128}, "zero: wrong size"),
    ],
)
def test_weights_that_are_not_what_the_node_says(
    open_node: Callable[..., Any],
    make_node: MakeNode,
    random_weight: MakeWeight,
    attributes: dict[str, int],
    said: str,
) -> None:
    weight = random_weight(Packing(48, 64, 8, 64))
    node = linear_node(make_node, np.zeros((1, 64), np.float32), weight)
    changed = make_node(node.op, node.inputs, node.constants, dict(node.attributes) | attributes)
    with pytest.raises(Exception, match=f"node 'node': .*{said}"):
        open_node(changed)


@pytest.mark.parametrize("left_out", ["bits", "n", "k", "block_size", "activation", "exact_tokens"])
def test_attributes_are_required(
    open_node: Callable[..., Any], make_node: MakeNode, random_weight: MakeWeight, left_out: str
) -> None:
    weight = random_weight(Packing(48, 64, 8, 64))
    node = linear_node(make_node, np.zeros((1, 64), np.float32), weight)
    fewer = {name: value for name, value in node.attributes.items() if name != left_out}
    with pytest.raises(Exception, match=left_out):
        open_node(make_node(node.op, node.inputs, node.constants, fewer))


@pytest.mark.parametrize("name", ["codes", "scale"])
def test_weights_that_are_no_constants(
    open_node: Callable[..., Any], make_node: MakeNode, random_weight: MakeWeight, name: str
) -> None:
    weight = random_weight(Packing(48, 64, 8, 64))
    node = linear_node(make_node, np.zeros((1, 64), np.float32), weight)
    computed = make_node(node.op, node.inputs, node.constants - {name}, node.attributes)
    with pytest.raises(Exception, match=f"{name}: wrong size"):
        open_node(computed)


def test_a_bias_of_another_size(linear: Callable[..., Array], random_weight: MakeWeight) -> None:
    weight = random_weight(Packing(48, 64, 8, 64))
    with pytest.raises(Exception, match="bias: wrong size"):
        linear(np.zeros((1, 64), np.float32), weight, np.zeros(47, np.float32))
