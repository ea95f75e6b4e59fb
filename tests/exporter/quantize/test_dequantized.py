"""What DequantizeLinear makes of the stored weights, through ONNX Runtime, and which weights have
which blocks."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from trtllm_lite.exporter.calibration.symmetric import SymmetricQuantizer
from trtllm_lite.exporter.quantize.formats import FORMATS, Format
from trtllm_lite.exporter.quantize.plan import Linear, plan_dequantized
from trtllm_lite.exporter.quantize.quantizer import HALVES, Quantizer, RoundToNearest

KINDS = ("int8_dq32", "int8_dq128", "int4_dq64", "fp8_dq128")
TYPES = {
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
}
N, K = 7, 256
# Half a step, as a share of the largest magnitude of a block; fp8: of each number.
HALF_STEP = {"int8": 0.5 / 127, "int4": 0.5 / 7, "float8e4m3fn": 2.0**-4}


def quantizer_of(kind: Format) -> Quantizer:
    symmetric = kind.bits == 4 and kind.dequantized
    return SymmetricQuantizer({}) if symmetric else RoundToNearest()


def encoded(kind: Format, rows: Any, cuts: tuple[int, ...] = ()) -> tuple[bytes, Any]:
    """Bytes of the weight, and scales [K / block, N]."""
    encoder = kind.encoder(N, K, quantizer_of(kind))
    pieces = [encoder.add("w", part) for part in np.split(rows, cuts)]
    (scale,) = encoder.rest().values()
    return b"".join(piece.tobytes() for piece in pieces), scale


def floats(kind: Format, weight: bytes, scale: Any) -> Any:
    """[N, K], by the operator."""
    dtype = TYPES[kind.parts[0].dtype]
    stored = helper.make_tensor("q", dtype, [K, N], weight, raw=True)
    node = helper.make_node("DequantizeLinear", ["q", "s"], ["y"], axis=0, block_size=kind.block)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("s", TensorProto.FLOAT, list(scale.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [K, N])],
        [stored],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"s": scale})[0].T


@pytest.fixture
def rows() -> Any:
    made = np.random.default_rng(0).standard_t(4, (N, K)).astype(np.float32)
    made[2, :128] = 0
    return made


@pytest.mark.parametrize("name", KINDS)
def test_the_operator_gives_the_weights_back(name: str, rows: Any) -> None:
    kind = FORMATS[name]
    weight, scale = encoded(kind, rows)
    assert scale.shape == kind.parts[1].shape(N, K)
    got = floats(kind, weight, scale)
    largest = np.abs(rows.reshape(N, -1, kind.block)).max(-1).repeat(kind.block, 1)
    step = HALF_STEP[kind.parts[0].dtype]
    if kind.bits == 4:
        # The search clips a few for the sake of the others.
        assert np.square(got - rows).mean() < (step * largest).mean() ** 2 / 3
    else:
        allowed = step * (np.abs(rows) if "fp8" in name else largest) + 2e-3 * largest
        assert (np.abs(got - rows) <= allowed).all()
    assert not got[2, :128].any()


@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("scales", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*KINDS, "int8_block32", "int4_block32"])
def test_integers_are_chosen_for_the_scales_that_are_stored(
    name: str, scales: str, magnitude: float, rows: Any
) -> None:
    """float16 has few digits left for the scales of small weights, bfloat16 always."""
    kind = FORMATS[name]
    weights = rows / np.abs(rows).max() * np.float32(magnitude)
    encoder = kind.encoder(N, K, quantizer_of(kind), scales)
    encoder.add("w", weights)
    scale = encoder.rest()[kind.parts[1].suffix]
    np.testing.assert_array_equal(scale, scale.astype(HALVES[scales]).astype(np.float32))
    largest = np.abs(weights.reshape(N, -1, kind.block)).max(-1)
    if kind.bits == 8:
        # What rounds to the largest number that there is.
        top = 464.0 if "fp8" in name else 127.5
        assert (top * (scale.T if kind.dequantized else scale) >= largest).all()


@pytest.mark.parametrize("name", KINDS)
def test_rows_come_in_any_pieces(name: str, rows: Any) -> None:
    whole, pieces = (encoded(FORMATS[name], rows, cuts) for cuts in ((), (1, 4)))
    assert whole[0] == pieces[0]
    np.testing.assert_array_equal(whole[1], pieces[1])


def test_zero_points_have_no_place(rows: Any) -> None:
    kind = FORMATS["int4_dq64"]
    with pytest.raises(ValueError, match="w has zero points"):
        kind.encoder(N, K, RoundToNearest()).add("w", rows)


def linear(name: str, columns: int, *, is_head: bool = False) -> Linear:
    return Linear(name, 8, columns, (name,), is_head=is_head, is_embedding=is_head)


@pytest.mark.parametrize(
    ("quantize", "columns", "kind", "head"),
    [
        ("int8", (256, 384), "int8_dq128", "int8_dq128"),
        ("int8", (256, 192), "int8_dq64", "int8_dq128"),
        ("int4", (256, 384), "int4_dq64", "int8_dq128"),
        ("int4", (256, 96), "int4_dq32", "int8_dq128"),
        ("fp8", (256, 96), "fp8_dq32", "fp8_dq128"),
    ],
)
def test_blocks_divide_all_columns(
    quantize: str, columns: tuple[int, ...], kind: str, head: str
) -> None:
    weights = [linear(f"w{k}", k) for k in columns] + [linear("head", 256, is_head=True)]
    plan = plan_dequantized(quantize, weights)
    assert (plan.prefill, plan.decode, plan.lm_head) == (kind, kind, head)
    assert (plan.embedding, plan.overrides) == ("none", {})


def test_what_no_block_divides_stays_plain() -> None:
    weights = [linear("odd", 100), linear("even", 256), linear("head", 100, is_head=True)]
    plan = plan_dequantized("int8", weights)
    assert (plan.prefill, plan.lm_head, plan.overrides) == ("int8_dq32", "none", {"odd": "none"})


def test_kept_weights_are_int8() -> None:
    weights = [linear("a", 256), linear("b", 192), linear("head", 256, is_head=True)]
    plan = plan_dequantized("int4", weights, ["b"])
    assert (plan.prefill, plan.overrides) == ("int4_dq64", {"b": "int8_dq64"})


def test_nothing_was_asked_for() -> None:
    assert plan_dequantized("none", [linear("a", 256)]).overrides == {}
    assert plan_dequantized("none", [linear("a", 256)]).decode == "none"
