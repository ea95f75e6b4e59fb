"""BlockGather against the values that the codes stand for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trtllm_lite.runtime.native_layout import Packing

Array = npt.NDArray[Any]
MakeNode = Callable[..., Any]
MakeWeight = Callable[..., Any]
Run = Callable[[Any], list[Array]]

PACKINGS = [
    Packing(33, 64, 8, 64),
    Packing(70, 100, 8, 32),
    Packing(33, 64, 4, 64),
    Packing(70, 100, 4, 32),
    Packing(5, 9, 4, 128),
]


def gather_node(make_node: MakeNode, ids: Array, weight: Any, activation: int = 0) -> Any:
    return make_node(
        "BlockGather",
        [("ids", ids), *weight.tensors],
        frozenset({"codes", "scale", "zero"}),
        weight.attributes | {"activation": activation},
    )


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_every_row(
    run_node: Run, make_node: MakeNode, random_weight: MakeWeight, packing: Packing
) -> None:
    weight = random_weight(packing)
    ids = np.arange(packing.n)[::-1].copy()
    made = run_node(gather_node(make_node, ids, weight))[0]
    # Two roundings of float32 on what a code and its zero point stand for.
    bound = 2 * 2.0**-24 * weight.magnitude[ids] + 1e-30
    assert made.dtype == np.float32
    assert (np.abs(made - weight.values[ids]) <= bound).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_ids_of_any_shape(
    run_node: Run, make_node: MakeNode, random_weight: MakeWeight, shape: tuple[int, ...]
) -> None:
    weight = random_weight(Packing(33, 64, 8, 64))
    ids = np.random.default_rng(0).integers(0, 33, shape)
    made = run_node(gather_node(make_node, np.asarray(ids, np.int64), weight))[0]
    assert made.shape == (*shape, 64)
    np.testing.assert_allclose(made, weight.values[ids], rtol=1e-6)


@pytest.mark.parametrize("bad", [-1, 33, 2**40, -(2**62)])
def test_ids_that_do_not_exist(
    run_node: Run, make_node: MakeNode, random_weight: MakeWeight, bad: int
) -> None:
    weight = random_weight(Packing(33, 64, 8, 64))
    with pytest.raises(Exception, match="ids: an index is out of range"):
        run_node(gather_node(make_node, np.array([[0, bad]]), weight))


def test_a_gather_has_no_activation(
    open_node: Callable[..., Any], make_node: MakeNode, random_weight: MakeWeight
) -> None:
    weight = random_weight(Packing(34, 64, 8, 64))
    with pytest.raises(Exception, match="activation: a gather has none"):
        open_node(gather_node(make_node, np.array([0]), weight, activation=1))
