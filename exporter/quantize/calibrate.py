"""What a calibration text is used for: evener activations, better 4-bit integers, and the weights
to spare."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt
import psutil

from trtllm_lite.exporter.calibration.cache_scales import cache_scales
from trtllm_lite.exporter.calibration.costs import (
    block_costs,
    grouped,
    row_costs,
    spare_within,
    worst_projections,
)
from trtllm_lite.exporter.calibration.equalize import equalize
from trtllm_lite.exporter.calibration.quantizer import CalibratedQuantizer
from trtllm_lite.exporter.calibration.rounding_trial import Rounding
from trtllm_lite.exporter.calibration.scaling import Scaling
from trtllm_lite.exporter.calibration.statistics import Statistics, collect, moment_bytes
from trtllm_lite.exporter.calibration.symmetric import SymmetricQuantizer
from trtllm_lite.exporter.checkpoint import Checkpoint
from trtllm_lite.exporter.native.cache import CacheScales
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.quality.texts import WINDOW, text_windows
from trtllm_lite.exporter.quantize.formats import FORMATS, INT8_BLOCK32, W8A8
from trtllm_lite.exporter.quantize.plan import CANDIDATES, SAME, Linear, format_bytes_of
from trtllm_lite.exporter.quantize.quantizer import Quantizer, RoundToNearest
from trtllm_lite.exporter.quantize.turned import turn_conv1d, turned_back
from trtllm_lite.exporter.reference import load_reference
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import KVLayer
from trtllm_lite.runtime.progress import Progress

Array = npt.NDArray[Any]
Encode = Callable[[str], Sequence[int]]
TEXT_TOKENS = 8192
# Of the bytes of all 4-bit weights: what keeping some in int8 may add.
SPARED_SHARE = 0.06
# Nats a token that per-token activations may be expected to cost; half of the gate's 2.5 percent,
# since the expectation is one of second order.
ROW_COST_LIMIT = 0.012
# How projections round, with the perplexity that each may cost by its gate.
BLOCKS_OF_8_BITS = Rounding(bits=8, block=32, limit=0.010)
BLOCKS_OF_4_BITS = Rounding(bits=4, block=32, limit=0.052)
ROWS_OF_8_BITS = Rounding(bits=8, block=None, limit=0.025)
# Float32 logits and their gradients while a window is read.
ROOM_TO_WORK = 2**30


@dataclass(frozen=True)
class Calibrated:
    """The quantizer of 4-bit weights, the weights that stay in int8 blocks, the parameters that
    are scaled before they are quantized, and the steps of an int8 cache, where one is asked for."""

    quantizer: Quantizer
    keep_int8: tuple[str, ...] = ()
    scalings: Mapping[str, Scaling] = field(default_factory=dict)
    cache: CacheScales | None = None


NOT_CALIBRATED = Calibrated(RoundToNearest())


@dataclass(frozen=True)
class Text:
    """How the calibration text becomes tokens: by `encode`, or random ids below `vocab_size` when
    there is none, in windows of at most `longest` tokens."""

    encode: Encode | None
    vocab_size: int
    longest: int


def calibrate(
    options: ExportOptions,
    checkpoint: Checkpoint,
    weights: Iterable[Linear],
    layers: Sequence[KVLayer],
    text: Text,
    progress: Progress,
) -> Calibrated:
    """Read the calibration text with the reference model.

    weights: as `find_linears` gives them; layers: of the cache. The features that norms give to
    projections are evened out. Of int4, the weights that lose most for their bytes are kept; where
    activations are rounded by the token, those that this hurts most. Where the reference does not
    fit in memory, 4-bit grids are searched for the least error of the weights alone, and that is
    all; an int8 cache then raises UsageError.
    """
    weights = tuple(weights)
    inner = [w for w in weights if w.is_linear and not w.is_head]
    if 4 * sum(w.rows * w.columns for w in weights) + ROOM_TO_WORK > _free_bytes():
        if options.kv_dtype == "int8":
            raise UsageError(
                "--kv-dtype int8: the reference does not fit in memory, and without reading a text "
                "with it the steps of the cache are not known; allowed here: float32, float16"
            )
        progress.note("the reference does not fit in memory: quantized without a calibration text")
        return Calibrated(_of_4_bits(options, {}))
    progress.step("load the reference")
    model = load_reference(checkpoint, options.dtype, options.num_layers).model
    turned = turn_conv1d(model)
    progress.step("even out the activations")
    windows = _windows(text)
    scalings = turned_back(equalize(model, windows, progress, _roundings(options)), turned)
    cache = None
    if options.kv_dtype == "int8":
        progress.step("measure keys and values")
        cache = cache_scales(model, layers, windows, text.longest, progress)
    made = _quantizer(options, model, inner, windows, progress)
    return replace(made, scalings=scalings, cache=cache)


def _quantizer(
    options: ExportOptions, model: Any, inner: list[Linear], windows: Array, progress: Progress
) -> Calibrated:
    """The integers, and what is spared of them."""
    if options.quantize == "int8" and options.prefill_format == SAME:
        return NOT_CALIBRATED
    progress.step("read the calibration text")
    with_moments = (
        options.quantize != "int8" and moment_bytes(model) + ROOM_TO_WORK <= _free_bytes()
    )
    statistics = collect(model, windows, progress, with_moments=with_moments)
    progress.step("weigh the loss of each weight")
    if options.quantize == "int8":
        costs = grouped(row_costs(model, statistics), _parts(inner))
        return Calibrated(RoundToNearest(), worst_projections(costs, ROW_COST_LIMIT))
    kind = FORMATS[CANDIDATES["int4"][0]]
    costs = grouped(block_costs(model, statistics, kind.bits, kind.block), _parts(inner))
    extra, budget = _room(inner, kind.name)
    kept = spare_within(costs, extra, budget)
    return Calibrated(_of_4_bits(options, statistics), kept)


def _of_4_bits(options: ExportOptions, statistics: Statistics) -> Quantizer:
    """DequantizeLinear, as TensorRT takes it, has no zero points."""
    symmetric = options.target == "tensorrt"
    return SymmetricQuantizer(statistics) if symmetric else CalibratedQuantizer(statistics)


def _roundings(options: ExportOptions) -> tuple[Rounding, ...]:
    """Those of both phases, and of the native kernels."""
    blocks = BLOCKS_OF_8_BITS if options.quantize == "int8" else BLOCKS_OF_4_BITS
    by_row = options.prefill_format == W8A8.name or (
        options.quantize == "int8" and options.prefill_format != SAME
    )
    return (blocks, ROWS_OF_8_BITS) if by_row else (blocks,)


def _windows(text: Text) -> Array:
    length = min(WINDOW, text.longest)
    windows = text_windows("calibration", text.encode, text.vocab_size, length)
    return windows[: max(1, TEXT_TOKENS // windows.shape[1])]


def _room(weights: Iterable[Linear], kind: str) -> tuple[dict[str, int], int]:
    """What keeping each weight in int8 adds to the file, and how much may be added."""
    extra, total = {}, 0
    for w in weights:
        small = format_bytes_of(kind, w.rows, w.columns)
        extra[w.name] = format_bytes_of(INT8_BLOCK32.name, w.rows, w.columns) - small
        total += small
    return extra, int(SPARED_SHARE * total)


def _parts(weights: Iterable[Linear]) -> dict[str, tuple[str, ...]]:
    return {w.name: w.parts for w in weights}


def _free_bytes() -> int:
    return int(psutil.virtual_memory().available)
