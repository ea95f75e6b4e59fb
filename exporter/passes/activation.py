"""Activations as one node."""

from collections.abc import Sequence
from math import pi, sqrt

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import MICROSOFT, constant, producer, remove_dead, replace


def fuse_activation(model: ir.Model) -> int:
    """x sigmoid(x) -> QuickGelu(alpha=1), and the long form of the tanh GELU -> Gelu.

    Source: ONNX Runtime, com.microsoft.QuickGelu; GELU, arXiv:1606.08415.
    """
    return sum(_silu(node) or _gelu(node) for node in list(model.graph) if node.op_type == "Mul")


def fuse_gelu(model: ir.Model) -> int:
    """The long form of the tanh GELU -> Gelu (ai.onnx 20)."""
    return sum(_gelu(node) for node in list(model.graph) if node.op_type == "Mul")


def _silu(node: ir.Node) -> bool:
    for x, gate in _orders(node):
        sigmoid = producer(gate, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is x:
            replace(node, "QuickGelu", [x], {"alpha": 1.0}, MICROSOFT)
            remove_dead([sigmoid])
            return True
    return False


def _gelu(node: ir.Node) -> bool:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    for half, gate in _orders(node):
        x = _scaled(half, 0.5)
        tanh = producer(_plus(gate, 1.0), "Tanh")
        inner = _scaled(tanh.inputs[0], sqrt(2 / pi)) if tanh is not None else None
        add = producer(inner, "Add")
        if x is None or add is None:
            continue
        if any(a is x and _is_cube(_scaled(b, 0.044715), x) for a, b in _orders(add)):
            feeding = [v.producer() for v in node.inputs if v is not None]
            replace(node, "Gelu", [x], {"approximate": "tanh"})
            remove_dead([n for n in feeding if n is not None])
            return True
    return False


def _is_cube(value: ir.Value | None, x: ir.Value) -> bool:
    power = producer(value, "Pow")
    return power is not None and power.inputs[0] is x and _is_number(power.inputs[1], 3.0)


def _scaled(value: ir.Value | None, factor: float) -> ir.Value | None:
    """What is multiplied by a constant to give the value."""
    return _other(producer(value, "Mul"), factor)


def _plus(value: ir.Value | None, term: float) -> ir.Value | None:
    return _other(producer(value, "Add"), term)


def _other(node: ir.Node | None, number: float) -> ir.Value | None:
    if node is None:
        return None
    return next((a for a, b in _orders(node) if _is_number(b, number)), None)


def _is_number(value: ir.Value | None, number: float) -> bool:
    numbers = constant(value)
    return numbers is not None and numbers.size == 1 and np.float32(number) == numbers.reshape(())


def _orders(node: ir.Node) -> Sequence[tuple[ir.Value | None, ir.Value | None]]:
    a, b = node.inputs
    return ((a, b), (b, a))
