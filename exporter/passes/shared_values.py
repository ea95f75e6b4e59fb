"""Values that every attention of a graph reads, made once: where it writes, what it may see.

Token i of a row stands at past_lens + i, padding at the end of the row included. Masks are bool,
True where a query sees a key; every query sees at least one. A window counts the query itself.
"""

from functools import cached_property

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import Dims
from trtllm_lite.exporter.passes.edit import dims as sizes
from trtllm_lite.exporter.passes.place import Place

SEQ_AXIS, CAPACITY_AXIS = 1, 2
INT64, BOOL = ir.DataType.INT64, ir.DataType.BOOL
BATCH, SEQ, CAPACITY = "batch", "seq", "capacity"


class SharedValues:
    """Those of one graph, put before the first of their readers."""

    def __init__(self, graph: ir.Graph, first_reader: ir.Node) -> None:
        self._place = Place(first_reader, in_module=False)
        self._inputs = {str(value.name): value for value in graph.inputs}
        self._masks: dict[tuple[str, int | None], ir.Value] = {}

    @cached_property
    def write_indices(self) -> ir.Value:
        """[batch] int64: the row of the cache that takes the first token."""
        past = self._inputs["past_lens"]
        return self._named("write_indices", self._op("Cast", past, (BATCH,), to=INT64))

    @cached_property
    def visible_lens(self) -> ir.Value:
        """[batch] int64: how many rows of the cache the last query sees, padding included."""
        count = self._size("input_ids", SEQ_AXIS)
        return self._named("visible_lens", self._op("Add", self.write_indices, (BATCH,), count))

    def fresh_mask(self, window: int | None) -> ir.Value:
        """[seq, seq] bool, where keys are the tokens of the run."""
        key = "fresh_mask", window
        if key not in self._masks:
            queries = self._op("Unsqueeze", self._steps, (SEQ, 1), self._place.ints(1))
            self._masks[key] = self._causal(self._steps, queries, window, (SEQ, SEQ))
        return self._masks[key]

    def cache_mask(self, window: int | None) -> ir.Value:
        """[batch, 1, seq, capacity] bool, where keys are the rows of the cache."""
        key = "cache_mask", window
        if key not in self._masks:
            dims = (BATCH, 1, SEQ, CAPACITY)
            self._masks[key] = self._causal(self._rows, self._places, window, dims)
        return self._masks[key]

    def _causal(
        self, keys: ir.Value, queries: ir.Value, window: int | None, dims: Dims
    ) -> ir.Value:
        past = self._op("LessOrEqual", keys, dims, queries, dtype=BOOL)
        if window is None:
            return past
        before = self._op("Sub", queries, sizes(queries) or (), self._place.number(window, INT64))
        near = self._op("Greater", keys, dims, before, dtype=BOOL)
        return self._op("And", past, dims, near, dtype=BOOL)

    @cached_property
    def _steps(self) -> ir.Value:
        """[seq] int64: 0, 1, ..."""
        return self._range("input_ids", SEQ_AXIS, SEQ)

    @cached_property
    def _rows(self) -> ir.Value:
        """[capacity] int64: 0, 1, ..."""
        return self._range("past_key_0", CAPACITY_AXIS, CAPACITY)

    @cached_property
    def _places(self) -> ir.Value:
        """[batch, 1, seq, 1] int64: the row of the cache that each token takes."""
        first = self._op("Unsqueeze", self.write_indices, (BATCH, 1), self._place.ints(1))
        places = self._op("Add", first, (BATCH, SEQ), self._steps)
        return self._op("Unsqueeze", places, (BATCH, 1, SEQ, 1), self._place.ints(1, 3))

    def _range(self, name: str, axis: int, dim: str) -> ir.Value:
        count = self._op("Squeeze", self._size(name, axis), (), self._place.ints(0))
        zero, one = (self._place.number(n, INT64) for n in (0, 1))
        return self._op("Range", zero, (dim,), count, one)

    def _size(self, name: str, axis: int) -> ir.Value:
        """A dimension of an input, int64 [1]."""
        value = self._inputs[name]
        return self._op("Shape", value, (1,), dtype=INT64, start=axis, end=axis + 1)

    def _op(
        self,
        op_type: str,
        first: ir.Value,
        dims: Dims,
        *others: ir.Value,
        dtype: ir.DataType = INT64,
        **attributes: int,
    ) -> ir.Value:
        return self._place.op(op_type, first, *others, dtype=dtype, shape=dims, **attributes)

    @staticmethod
    def _named(name: str, value: ir.Value) -> ir.Value:
        value.name = name
        return value
