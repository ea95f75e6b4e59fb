"""The native graph's files in a bundle: the graph, and the table that says how its data are made.

The data themselves are not in the bundle: they are weights.bin in another order, and are made on
the machine that runs them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from trtllm_lite.exporter.external_data import ALIGNMENT, Placed
from trtllm_lite.exporter.native.cache import CacheScales, with_cache
from trtllm_lite.exporter.native.lower import NativeGraph, round_fast
from trtllm_lite.runtime.kv_dtype import KVDtype
from trtllm_lite.runtime.native_table import (
    DATA_NAME,
    PLAIN_CACHE,
    TABLE_NAME,
    VERSION,
    Copy,
    NativeTable,
    PackedWeight,
    Rounding,
    graph_name,
    graph_names,
    to_json,
)

# In this order: what is "exact" becomes "fast" in place.
ROUNDINGS: tuple[Rounding, ...] = ("exact", "fast")

SUFFIXES = {8: ("q8", "q8_scale", None), 4: ("q4", "q4_scale", "q4_zero")}


def write_native(
    folder: Path,
    native: NativeGraph,
    places: Mapping[str, Placed],
    kv_dtypes: tuple[KVDtype, ...] = (PLAIN_CACHE,),
    scales: CacheScales | None = None,
) -> list[str]:
    """Write the graphs and the table, and return their names. `places`: of weights.bin.
    `kv_dtypes`: a graph for each, first the one that the bundle is made for; `scales`: for int8."""
    table, targets = _table(native, places)
    table = replace(table, kv_dtypes=kv_dtypes)
    for name, value in native.model.graph.initializers.items():
        if value.const_value is None:
            assert value.shape is not None
            assert value.dtype is not None
            offset, length = targets[name]
            value.const_value = ir.ExternalTensor(
                DATA_NAME, offset, length, value.dtype, shape=value.shape, name=name
            )
    for rounding in ROUNDINGS:
        if rounding == "fast":
            round_fast(native)
        for kind in kv_dtypes:
            made = with_cache(native.model, kind, scales)
            ir.save(made, folder / graph_name(rounding, kind))
    text = json.dumps(to_json(table), indent=1)
    (folder / TABLE_NAME).write_text(text + "\n", encoding="utf-8")
    return [*graph_names(kv_dtypes), TABLE_NAME]


def _table(
    native: NativeGraph, places: Mapping[str, Placed]
) -> tuple[NativeTable, dict[str, tuple[int, int]]]:
    """The table, and for each initializer its (offset, length) in the data file."""
    targets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, value in native.model.graph.initializers.items():
        if value.const_value is None:
            length = _nbytes(value)
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            targets[name] = (offset, length)
            end = offset + length
    weights = []
    coded = set()
    for name, packing in native.packings.items():
        codes, scale, zero = SUFFIXES[packing.bits]
        coded |= {f"{name}.codes", f"{name}.scale", f"{name}.zero"}
        weights.append(
            PackedWeight(
                packing=packing,
                codes=(places[f"{name}.{codes}"].offset, targets[f"{name}.codes"][0]),
                scale=(places[f"{name}.{scale}"].offset, targets[f"{name}.scale"][0]),
                zero=None
                if zero is None
                else (places[f"{name}.{zero}"].offset, targets[f"{name}.zero"][0]),
            )
        )
    copies = tuple(
        Copy(places[name].offset, offset, length)
        for name, (offset, length) in targets.items()
        if name not in coded
    )
    return NativeTable(VERSION, end, tuple(weights), copies), targets


def _nbytes(value: ir.Value) -> int:
    assert value.shape is not None
    assert value.dtype is not None
    count = 1
    for dim in value.shape.numpy():
        count *= int(dim)
    return count * value.dtype.bitwidth // 8
