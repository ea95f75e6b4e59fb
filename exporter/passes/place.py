"""A place in a graph where new nodes are put, one after the other."""

from typing import Any

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import Dims, graph_of, initializer, int64s, make


class Place:
    """Just before a node. New nodes belong to that one's module, or to none when `in_module` is
    False."""

    def __init__(self, before: ir.Node, *, in_module: bool = True) -> None:
        self._before = before
        self._in_module = in_module

    @property
    def graph(self) -> ir.Graph:
        return graph_of(self._before)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        dtype: ir.DataType | None = None,
        shape: Dims | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """The output of a new ai.onnx node; dtype None is that of the first input."""
        node = make(self._before, op_type, inputs, attributes)
        if not self._in_module:
            node.metadata_props.clear()
        value = node.outputs[0]
        first = inputs[0]
        kind = dtype if dtype is not None or first is None else first.dtype
        if kind is not None:
            value.type = ir.TensorType(kind)
        if shape is not None:
            value.shape = ir.Shape(shape)
        return value

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """A constant scalar."""
        name = f"scalar.{dtype.name.lower()}.{value:.9g}"
        return initializer(self.graph, name, np.array(value, dtype.numpy()))

    def ints(self, *numbers: int) -> ir.Value:
        """Constant integers, int64 [n]."""
        return int64s(self.graph, numbers)
