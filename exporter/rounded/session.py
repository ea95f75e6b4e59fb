"""A session over a bundle in half precision that rounds as a GPU does, on a CPU.

ONNX Runtime's CPU provider has no bfloat16 kernels, and computes most of a float16 graph in float32
without rounding in between, which hides what goes beyond float16. Here the graphs are rewritten
(`exporter/rounded/graph.py`); batches, cache and addresses are those of the target's own session.
"""

import dataclasses
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from trtllm_lite.exporter.rounded.graph import in_float32
from trtllm_lite.runtime.backends.base import Session, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.graph_io import graph_io, with_cache_dtype
from trtllm_lite.runtime.backends.host_device import HostDevice
from trtllm_lite.runtime.backends.kv_pool import KVPool
from trtllm_lite.runtime.backends.ort_cuda import SLOT_STEP
from trtllm_lite.runtime.backends.ort_cuda_session import LoadedStep, OrtCudaSession
from trtllm_lite.runtime.backends.ort_session import LoadedGraph, OrtSession
from trtllm_lite.runtime.backends.phases import graphs_to_open, takes_several_tokens
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.manifest import Manifest

KINDS = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def computes_in_half(manifest: Manifest) -> bool:
    """Whether the arithmetic is in float16 or bfloat16, not only the storage of weights."""
    return manifest.kv.dtype in KINDS


def open_rounded(bundle: Bundle, options: SessionOptions) -> Session:
    """A session of the bundle's target whose values and cache are float32 holding what is of the
    bundle's type. Of the options it takes `num_slots`, `capacity` and `phases`."""
    if bundle.manifest.target == "cuda":
        return _over_addresses(bundle, options)
    return _over_pool(bundle, options)


def _over_pool(bundle: Bundle, options: SessionOptions) -> OrtSession:
    manifest = with_cache_dtype(bundle.manifest, "float32")
    graphs = {
        phase: LoadedGraph(graph_io(manifest, phase), _load(bundle, bundle.graph_path(phase)))
        for phase in graphs_to_open(manifest, options.phases)
    }
    pool = KVPool(manifest.kv, options.num_slots, options.capacity)
    several = takes_several_tokens(manifest)
    info = dataclasses.replace(_info(manifest), multi_token_decode=several)
    return OrtSession(ort, graphs, pool, options, info)


def _over_addresses(bundle: Bundle, options: SessionOptions) -> OrtCudaSession:
    manifest = with_cache_dtype(bundle.manifest, "float32")
    io = graph_io(manifest, "decode")
    longest = min(manifest.limits.max_model_len, options.capacity)
    session = _load(bundle, bundle.graph_path("decode"))
    step = LoadedStep(session, io, longest, "cpu", captures=False)
    device = HostDevice()
    capacity = -(-options.capacity // SLOT_STEP) * SLOT_STEP
    pool = DevicePool(device, manifest.kv, options.num_slots, capacity)
    info = dataclasses.replace(_info(manifest), top_logits=int(io.top[0].shape[2]))
    return OrtCudaSession(ort, step, device, pool, options, info)


def _info(manifest: Manifest) -> SessionInfo:
    return SessionInfo("onnxruntime", "cpu", 0, manifest.kv.bytes_per_token)


def _load(bundle: Bundle, path: Path) -> Any:
    """From memory: the bundle may not be ours to write in. Fusions that reach over a rounding would
    take it out; folding constants casts each weight once."""
    model = in_float32(ir.load(path), KINDS[bundle.manifest.kv.dtype], rounded=True)
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.log_severity_level = 3
    settings.add_session_config_entry(EXTERNAL_FOLDER, str(bundle.folder))
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, settings, ["CPUExecutionProvider"])
