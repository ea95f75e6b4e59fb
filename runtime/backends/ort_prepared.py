"""ONNX Runtime's graphs prepared for this machine: optimised, their weights packed, in one file.

ONNX Runtime saves the packed form of the weights beside the graph that it has optimised, and maps
both from the file when it loads them. The files of prefill and decode are merged into one in which
equal weights stand once, so sessions and processes share the pages. What is packed depends on the
instruction set and on the version, which is why this belongs into the host cache.

The options are described in onnxruntime_session_options_config_keys.h.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.host_cache import PrepareError, Preparer
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.runtime.protobuf import WireError
from trtllm_lite.runtime.shared_initializers import SharedData, moved_into

NAME = "onnxruntime"
FORMAT = 1
DATA_NAME = "weights.data"
MIN_EXTERNAL_BYTES = 1024
"""Smaller constants stay in the graph, where shapes and axes are read at load."""


def prepared_name(phase: Phase) -> str:
    return f"{phase}.onnx"


def ort_preparer(ort: Any, graphs: Mapping[Phase, Path]) -> Preparer:
    """Prepares the graph files. `ort` is the onnxruntime module."""

    def prepare(folder: Path, progress: Progress) -> None:
        progress.step("prepare the weights for this machine")
        with (folder / DATA_NAME).open("wb") as file:
            shared = SharedData(file)
            for done, (phase, path) in enumerate(graphs.items()):
                progress.advance(done, len(graphs), "graphs")
                _prepare_graph(ort, path, folder / prepared_name(phase), shared)
        progress.advance(len(graphs), len(graphs), "graphs")

    return Preparer(NAME, f"{FORMAT}/{ort.__version__}", prepare)


def _prepare_graph(ort: Any, source: Path, target: Path, shared: SharedData) -> None:
    """Raises PrepareError or OSError."""
    graph, data = target.with_suffix(".raw"), target.with_suffix(".raw.data")
    try:
        _save_optimised(ort, source, graph, data)
        model = graph.read_bytes()
        if not data.exists():  # a graph whose constants are all small
            target.write_bytes(model)
            return
        with data.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as old:
            target.write_bytes(moved_into(shared, model, old, DATA_NAME))
    except WireError as error:
        raise PrepareError(f"{source.name}: {error}") from error
    finally:
        graph.unlink(missing_ok=True)
        data.unlink(missing_ok=True)


def _save_optimised(ort: Any, source: Path, graph: Path, data: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(graph)
    for key, value in (
        ("session.save_external_prepacked_constant_initializers", "1"),
        ("session.optimized_model_external_initializers_file_name", data.name),
        (
            "session.optimized_model_external_initializers_min_size_in_bytes",
            str(MIN_EXTERNAL_BYTES),
        ),
    ):
        options.add_session_config_entry(key, value)
    try:
        ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever ONNX Runtime raises; loading the bundle itself says why
        text = " ".join(str(error).split())
        raise PrepareError(f"{source.name} cannot be prepared: {text[:300]}") from error
