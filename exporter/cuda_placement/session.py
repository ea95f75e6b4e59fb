"""Run by itself, in a process that finds the stub libraries: creates a session on the CUDA provider
and writes as JSON where each node landed. Takes the path of the graph.

ONNX Runtime itself refuses a session with CUDA graphs when a node is not on CUDA, or when a copy
has to be put between nodes, and says so.
"""

import json
import os
import sys
from typing import Any


def placement(path: str) -> dict[str, Any]:
    """`nodes`: provider, operator and name of each; `error`: what ONNX Runtime refuses, or None."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    nodes, error = [], None
    try:
        session = ort.InferenceSession(path, settings, providers=_providers({}))
        for part in session.get_provider_graph_assignment_info():
            nodes += [[part.ep_name, n.op_type, n.name] for n in part.get_nodes()]
        captured = ort.InferenceSession(path, providers=_providers({"enable_cuda_graph": "1"}))
        del captured
    except Exception as refused:
        error = " ".join(str(refused).split())
    return {"onnxruntime": ort.__version__, "nodes": nodes, "error": error}


def _providers(options: dict[str, str]) -> list[Any]:
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(placement(sys.argv[1])))
    sys.stdout.flush()
    # What the libraries do at the end of a process is not written for stubs.
    os._exit(0)
