"""Products with weights in operators of ai.onnx."""

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import MICROSOFT, make, replace


def plain_products(model: ir.Model) -> int:
    """FusedMatMul(x, weight [out, in], transB=1) -> MatMul(x, Transpose(weight)); the weight stays
    as the checkpoint has it. Returns the number of products.

    Raises AssertionError when an operator of com.microsoft is left.
    """
    count = 0
    for node in [node for node in model.graph if node.op_type == "FusedMatMul"]:
        x, weight = node.inputs
        turned = make(node, "Transpose", [weight], {"perm": [1, 0]}).outputs[0]
        if weight is not None and weight.type is not None:
            turned.type = weight.type
        new = replace(node, "MatMul", [x, turned])
        new.name = node.name
        count += 1
    left = {node.op_type for node in model.graph if node.domain}
    assert not left, f"operators of other domains are left: {', '.join(sorted(left))}"
    model.graph.opset_imports.pop(MICROSOFT, None)
    return count
