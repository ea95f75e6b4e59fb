"""The valid keys of each row as a mask, for a TensorRT whose attention takes no lengths of rows.

Query i of S in a row of `lengths` valid keys sees key j where j < lengths - (S - 1 - i): the last
query is aligned with the last valid key. Without a causal mask every query sees the j < lengths.
The mask is made of a few layers in front of the attentions, once for all that share it, and takes
rows x S x capacity bytes. Source: NVIDIA TensorRT, IAttention and the layers named below.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.engines.trt_api import MaskNetwork, Tensor

SEQ_AXIS = 2
I64 = npt.NDArray[np.int64]


class RowMasks:
    """Masks of one network. Has to live until the network is built: the network points to numbers
    that are kept here."""

    def __init__(self, module: Any, network: MaskNetwork, capacity: int) -> None:
        self._trt = module
        self._network = network
        self._numbers: list[I64] = []
        self._keys = self._constant(np.arange(capacity).reshape(1, 1, 1, capacity))
        self._made: dict[tuple[str, bool], Tensor] = {}

    def mask(self, lengths: Tensor, query: Tensor, *, causal: bool) -> Tensor:
        """Bool [batch, 1, S, capacity], or [batch, 1, 1, capacity] for all queries alike, from
        lengths INT64 [batch] and a query [batch, heads, S, head_dim]."""
        key = (lengths.name, causal)
        if key not in self._made:
            limit = self._reshaped(lengths, (0, 1, 1, 1))
            if causal:
                limit = self._with_offsets(limit, query)
            self._made[key] = self._combined(self._keys, limit, self._trt.ElementWiseOperation.LESS)
        return self._made[key]

    def _with_offsets(self, limit: Tensor, query: Tensor) -> Tensor:
        """limit - (S - 1) + i for the queries i."""
        sizes = self._network.add_shape(query).get_output(0)
        axis = self._constant(np.array([SEQ_AXIS]))
        seq = self._network.add_gather(sizes, axis, 0).get_output(0)
        minus, plus = self._trt.ElementWiseOperation.SUB, self._trt.ElementWiseOperation.SUM
        last = self._combined(seq, self._constant(np.array([1])), minus)
        first = self._combined(limit, self._reshaped(last, (1, 1, 1, 1)), minus)
        return self._combined(first, self._reshaped(self._count(seq), (1, 1, -1, 1)), plus)

    def _count(self, number: Tensor) -> Tensor:
        """0, 1, .. number - 1, for a number that is known when the plan runs."""
        trt = self._trt
        fill = self._network.add_fill((1,), trt.FillOperation.LINSPACE, trt.DataType.INT64)
        fill.set_input(0, number)
        fill.set_input(1, self._constant(np.array(0)))
        fill.set_input(2, self._constant(np.array([1])))
        return fill.get_output(0)

    def _reshaped(self, tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
        """0 is the dimension that stands in the same place."""
        shuffle = self._network.add_shuffle(tensor)
        shuffle.reshape_dims = dims
        return shuffle.get_output(0)

    def _combined(self, a: Tensor, b: Tensor, operation: Any) -> Tensor:
        return self._network.add_elementwise(a, b, operation).get_output(0)

    def _constant(self, numbers: I64) -> Tensor:
        self._numbers.append(np.array(numbers, np.int64, order="C"))
        kept = self._numbers[-1]
        return self._network.add_constant(kept.shape, kept).get_output(0)
