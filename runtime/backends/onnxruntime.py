"""ONNX Runtime on the CPU: the backend of the `cpu` target.

Graphs of the `tensorrt` target run as well, as the oracle of the engines that are made of them: a
step's cost grows with the capacity of the cache.
"""

import re
from dataclasses import replace
from importlib import import_module
from typing import Any, get_args

from trtllm_lite.runtime.backends.base import (
    DecodeCost,
    KernelChoice,
    SessionInfo,
    SessionOptions,
)
from trtllm_lite.runtime.backends.kv_pool import KVPool
from trtllm_lite.runtime.backends.ort_graphs import SPIN_MICROSECONDS, open_graphs
from trtllm_lite.runtime.backends.ort_session import OrtSession
from trtllm_lite.runtime.backends.phases import graphs_to_open, takes_several_tokens
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import BundleError, MissingExtraError, UsageError
from trtllm_lite.runtime.host import physical_cores
from trtllm_lite.runtime.kv_dtype import check_kv_choice
from trtllm_lite.runtime.manifest import Manifest
from trtllm_lite.runtime.native_table import Rounding

OLDEST = (1, 32)
"""GroupQueryAttention takes `query_seqlens`, which ragged prefill needs, from this version on."""

TARGETS = ("cpu", "tensorrt")

DECODE_COSTS = {
    "none": DecodeCost(0.08),
    "int8_block32": DecodeCost(0.17),
    "int8_block64": DecodeCost(0.17),
}
DEAREST_DECODE_COST = DecodeCost(0.27)
NATIVE_DECODE_COSTS = {"fast": DecodeCost(0.125), "exact": DecodeCost(0.2)}
"""By the format of the decode graph's weights, from the processor time of runs of 1 to 17 tokens at
a context of 200 (135M parameters, AVX-512 VNNI), of our kernels by their rounding. The dearest is
for 4-bit blocks."""


def open_session(bundle: Bundle, options: SessionOptions) -> OrtSession:
    """Load the graphs of the phases that are asked for and map the KV pool.

    Raises MissingExtraError without a recent enough onnxruntime, BundleError for a graph that
    cannot be loaded or does not match its table, UsageError for options that cannot be honoured.
    """
    _check_options(bundle, options)
    options = replace(options, phases=graphs_to_open(bundle.manifest, options.phases))
    ort = import_onnxruntime()
    threads = options.intra_op_num_threads or physical_cores()
    opened = open_graphs(ort, bundle, threads, options)
    pool = KVPool(opened.kv, options.num_slots, options.capacity)
    info = SessionInfo(
        "onnxruntime",
        "cpu",
        threads,
        opened.kv.bytes_per_token,
        multi_token_decode=takes_several_tokens(bundle.manifest),
        decode_cost=_decode_cost(bundle.manifest, options, native=opened.native),
        shape_invariant=opened.native or _is_float32(bundle.manifest),
        spin=options.spin,
        weights="mapped" if opened.mapped else "private",
        huge_page_bytes=opened.huge_page_bytes,
        kernels="native" if opened.native else "onnxruntime",
        kv_dtype=opened.kv.dtype,
    )
    return OrtSession(ort, opened.graphs, pool, options, info)


def _is_float32(manifest: Manifest) -> bool:
    """Where activations are rounded to a coarser format, a difference in the last bit of float32
    becomes one of that format, and kernels for one token add up in another order than for more."""
    return (
        manifest.dtype == manifest.kv.dtype == "float32" and manifest.quantization.decode == "none"
    )


def _decode_cost(manifest: Manifest, options: SessionOptions, *, native: bool) -> DecodeCost:
    if native:
        return NATIVE_DECODE_COSTS[options.rounding]
    return DECODE_COSTS.get(manifest.quantization.decode, DEAREST_DECODE_COST)


def version() -> str:
    """Which version of ONNX Runtime would run a bundle. Raises MissingExtraError."""
    return str(import_onnxruntime().__version__)


def _check_options(bundle: Bundle, options: SessionOptions) -> None:
    if bundle.manifest.target not in TARGETS:
        allowed = ", ".join(TARGETS)
        raise BundleError("target", f"{bundle.manifest.target!r}; this backend runs {allowed}")
    if bundle.manifest.target == "tensorrt" and bundle.manifest.kv.dtype == "bfloat16":
        raise UsageError(
            "the bundle computes in bfloat16, for which ONNX Runtime has no CPU kernels; export it "
            "with --dtype float16 to run it on a CPU"
        )
    for name in ("num_slots", "capacity", "intra_op_num_threads"):
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name}: got {value!r}; allowed: integers from 1")
    if options.spin not in SPIN_MICROSECONDS:
        allowed = ", ".join(SPIN_MICROSECONDS)
        raise UsageError(f"spin: got {options.spin!r}; allowed: {allowed}")
    if options.kernels not in get_args(KernelChoice):
        allowed = ", ".join(get_args(KernelChoice))
        raise UsageError(f"kernels: got {options.kernels!r}; allowed: {allowed}")
    if options.rounding not in get_args(Rounding):
        allowed = ", ".join(get_args(Rounding))
        raise UsageError(f"rounding: got {options.rounding!r}; allowed: {allowed}")
    check_kv_choice(options.kv_dtype)
    if "decode" not in options.phases:
        raise UsageError(f"phases: got {options.phases}; 'decode' is always needed")


def import_onnxruntime(oldest: tuple[int, int] = OLDEST, extra: str = "cpu") -> Any:
    """The module. Raises MissingExtraError, which names the extra, where it is not installed or
    older than that."""
    try:
        ort = import_module("onnxruntime")
    except ModuleNotFoundError as error:
        raise MissingExtraError("onnxruntime", extra) from error
    version = tuple(int(x) for x in re.findall(r"\d+", ort.__version__)[:2])
    if version < oldest:
        needed = ".".join(map(str, oldest))
        raise MissingExtraError(f"onnxruntime {needed} or newer (found {ort.__version__})", extra)
    return ort
