"""What the tracer noted on nodes."""

import onnx_ir as ir

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
# `namespace` is what graph viewers group nodes by.
KEPT_NOTES = {NAME_SCOPES, "namespace"}


def drop_trace_notes(model: ir.Model) -> int:
    """Forget what the tracer noted on nodes, but for the module names: its stack traces hold paths
    of this machine, and would make a bundle's hash depend on where it was made."""
    count = 0
    for node in model.graph:
        for key in node.metadata_props.keys() - KEPT_NOTES:
            del node.metadata_props[key]
            count += 1
    model.graph.metadata_props.clear()
    return count


def scopes(node: ir.Node) -> list[str]:
    """Module names around a node, outermost first, as the tracer recorded them."""
    text = node.metadata_props.get(NAME_SCOPES, "[]")
    return [part.strip(" '\"") for part in text.strip("[]").split(",")]
