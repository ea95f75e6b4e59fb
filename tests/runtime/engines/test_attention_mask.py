"""The mask of valid keys, computed by numpy through the same calls that make the layers."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trtllm_lite.runtime.engines.attention_mask import RowMasks

Array = npt.NDArray[Any]
MODULE = SimpleNamespace(
    DataType=SimpleNamespace(INT64=np.int64),
    FillOperation=SimpleNamespace(LINSPACE="linspace"),
    ElementWiseOperation=SimpleNamespace(SUM=np.add, SUB=np.subtract, LESS=np.less),
)


@dataclass
class Value:
    """A tensor that knows its numbers."""

    numbers: Array
    name: str = "value"
    dtype: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


@dataclass
class Done:
    """A layer that has been computed."""

    numbers: Array
    reshape_dims: Any = None
    name: str = ""
    type: Any = None
    num_inputs: int = 0
    num_outputs: int = 1

    def get_input(self, index: int) -> Value | None:
        return None

    def get_output(self, index: int) -> Value:
        if self.reshape_dims is None:
            return Value(self.numbers)
        old = self.numbers.shape
        dims = [old[i] if d == 0 else d for i, d in enumerate(self.reshape_dims)]
        return Value(self.numbers.reshape(dims))


@dataclass
class Ramp(Done):
    """LINSPACE: start + step * 0, 1, .. of a shape that is given when it runs."""

    inputs: dict[int, Array] = field(default_factory=dict)

    def set_input(self, index: int, tensor: Value) -> None:
        self.inputs[index] = tensor.numbers

    def get_output(self, index: int) -> Value:
        shape, start, step = (self.inputs[i] for i in range(3))
        assert (shape.ndim, start.ndim, step.ndim) == (1, 0, 1)
        return Value(start + step[0] * np.arange(shape[0]))


class NumpyNetwork:
    """INetworkDefinition, computed at once."""

    def add_constant(self, shape: Any, weights: Array) -> Any:
        assert weights.dtype == np.int64
        return Done(weights.reshape(shape))

    def add_elementwise(self, a: Any, b: Any, op: Any) -> Any:
        assert len(a.shape) == len(b.shape)
        return Done(op(a.numbers, b.numbers))

    def add_fill(self, shape: Any, op: Any, output_type: Any) -> Any:
        assert (op, output_type) == ("linspace", np.int64)
        return Ramp(np.zeros(0))

    def add_gather(self, data: Any, indices: Any, axis: int) -> Any:
        return Done(np.take(data.numbers, indices.numbers, axis))

    def add_shape(self, tensor: Any) -> Any:
        return Done(np.array(tensor.shape, np.int64))

    def add_shuffle(self, tensor: Any) -> Any:
        return Done(tensor.numbers)


def mask_of(lengths: list[int], seq: int, capacity: int, *, causal: bool) -> Array:
    query = Value(np.zeros((len(lengths), 4, seq, 8)))
    masks = RowMasks(MODULE, NumpyNetwork(), capacity)
    mask: Any = masks.mask(Value(np.array(lengths, np.int64)), query, causal=causal)
    numbers: Array = mask.numbers
    return numbers


@pytest.mark.parametrize("seq", [1, 2, 5])
def test_the_last_query_sees_the_last_valid_key(seq: int) -> None:
    lengths, capacity = [5, 9, 12], 12
    mask = mask_of(lengths, seq, capacity, causal=True)
    assert mask.shape == (3, 1, seq, capacity)
    for row, length in enumerate(lengths):
        for i in range(seq):
            # Query i of the run stands at the place of its own key.
            sees = [j <= length - seq + i for j in range(capacity)]
            assert mask[row, 0, i].tolist() == sees


def test_without_a_causal_mask_every_query_sees_all_valid_keys() -> None:
    mask = mask_of([1, 8], 3, 8, causal=False)
    assert mask.shape == (2, 1, 1, 8)
    assert mask[:, 0, 0].sum(axis=-1).tolist() == [1, 8]
    assert mask[0, 0, 0].tolist() == [True] + 7 * [False]


def test_attentions_with_the_same_lengths_share_a_mask() -> None:
    masks = RowMasks(MODULE, NumpyNetwork(), 8)
    lengths, query = Value(np.array([3], np.int64), "lens"), Value(np.zeros((1, 1, 2, 4)))
    first = masks.mask(lengths, query, causal=True)
    assert masks.mask(lengths, query, causal=True) is first
    assert masks.mask(lengths, query, causal=False) is not first
