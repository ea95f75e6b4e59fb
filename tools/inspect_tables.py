"""The tables of `inspect`: pure functions from a manifest to text cells."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trtllm_lite.runtime.manifest import DTYPE_BYTES, GraphSpec, Manifest, Quantization, TensorSpec
from trtllm_lite.tools.console import Table, format_bytes, format_count, printable

if TYPE_CHECKING:
    from trtllm_lite.runtime.bundle import Bundle
    from trtllm_lite.tools.weights import WeightGroup


def facts(bundle: "Bundle") -> Table:
    """Model, source, limits and versions."""
    m = bundle.manifest
    model, source = m.model, m.source
    size = f"{format_count(model.num_parameters)} parameters, {model.num_layers} layers"
    ends = ", ".join(map(str, model.eos_token_ids))
    from_parts = [source.id, source.format, source.revision or "", source.license or ""]
    rows = [
        ("model", f"{model.model_type} ({model.architecture}), {size}"),
        ("sizes", f"hidden {model.hidden_size}, vocabulary {model.vocab_size}"),
        ("tokens", f"bos {model.bos_token_id}, eos {ends}, pad {model.pad_token_id}"),
        ("source", ", ".join(part for part in from_parts if part)),
        ("target", f"{m.target}, {m.dtype} weights"),
        ("quantization", quantization_text(m.quantization)),
        ("limits", f"{m.limits.max_num_seqs} sequences of {m.limits.max_model_len} tokens"),
        ("format", f"{m.format} {m.format_version}"),
        ("made with", ", ".join(f"{name} {v}" for name, v in sorted(m.producer.items()))),
    ]
    cells = tuple((name, printable(text)) for name, text in rows)
    return Table(f"Bundle {printable(str(bundle.folder))}", ("what", "value"), cells)


def quantization_text(q: Quantization) -> str:
    """The weight formats, and how many weights have another one."""
    parts = ("prefill", "decode", "embedding", "lm_head")
    text = ", ".join(f"{part} {getattr(q, part)}" for part in parts)
    kinds = Counter(q.overrides.values())
    return text + "".join(f", {n} weights {kind}" for kind, n in sorted(kinds.items()))


def graph_io(graph: GraphSpec, *, every_layer: bool) -> Table:
    """Inputs and outputs; the cache tensors of all layers in one row where they are alike."""
    rows = [("in", *row) for row in _rows(graph.inputs, every_layer)]
    rows += [("out", *row) for row in _rows(graph.outputs, every_layer)]
    title = f"Graph {graph.phase}: {printable(graph.file)}"
    return Table(title, ("", "name", "role", "dtype", "shape"), tuple(rows))


def _rows(tensors: Sequence[TensorSpec], every_layer: bool) -> list[tuple[str, str, str, str]]:
    # Keys and values alternate in a table; sorted by role, the layers of a role stand together.
    order = {role: i for i, role in enumerate(dict.fromkeys(t.role for t in tensors))}
    ordered = sorted(tensors, key=lambda t: order[t.role])
    rows = []
    for (role, dtype, shape, _), group in groupby(ordered, key=lambda t: _kind(t, every_layer)):
        alike = list(group)
        dims = "[" + ", ".join(map(str, shape)) + "]"
        rows.append((_names(alike), role, dtype, dims))
    return rows


def _kind(t: TensorSpec, every_layer: bool) -> tuple[str, str, tuple[int | str, ...], str]:
    alone = every_layer or t.layer is None
    return t.role, t.dtype, t.shape, t.name if alone else ""


def _names(tensors: list[TensorSpec]) -> str:
    first, last = printable(tensors[0].name), printable(tensors[-1].name)
    return first if len(tensors) == 1 else f"{first} .. {last} ({len(tensors)} layers)"


def kv_cache(manifest: Manifest, native: Mapping[str, int]) -> Table:
    """Bytes of the cache: a token, a slot, all slots. native: of a token under the native kernels,
    by the type of the cache, first the one that the bundle was made for."""
    kv, limits = manifest.kv, manifest.limits
    slot = kv.bytes_per_token * limits.max_model_len
    windows = sum(layer.sliding_window is not None for layer in kv.layers)
    rows = [
        ("layout", f"{kv.layout}, {kv.dtype}, {len(kv.layers)} layers ({windows} windowed)"),
        ("a token", format_bytes(kv.bytes_per_token)),
        (f"a slot of {limits.max_model_len} tokens", format_bytes(slot)),
        (f"all {limits.max_num_seqs} slots", format_bytes(slot * limits.max_num_seqs)),
    ]
    if native:
        made_for = " (default)" if len(native) > 1 else ""
        sizes = [
            f"{kind}{made_for if i == 0 else ''}, {format_bytes(size)} a token"
            for i, (kind, size) in enumerate(native.items())
        ]
        rows.append(("under the native kernels", "; ".join(sizes)))
    if kv.recompute_at is not None:
        rows.append(("computed again past", f"{kv.recompute_at} tokens"))
    return Table("KV cache", ("what", "value"), tuple(rows))


def kv_layers(manifest: Manifest) -> Table:
    """One row a layer: heads, head size, window, bytes a token."""
    itemsize = DTYPE_BYTES[manifest.kv.dtype]
    rows = tuple(
        (
            str(i),
            str(layer.num_kv_heads),
            str(layer.head_dim),
            "full" if layer.sliding_window is None else str(layer.sliding_window),
            format_bytes(2 * layer.num_kv_heads * layer.head_dim * itemsize),
        )
        for i, layer in enumerate(manifest.kv.layers)
    )
    columns = ("layer", "KV heads", "head size", "window", "a token")
    return Table("KV cache by layer", columns, rows, frozenset(range(5)))


def weight_table(groups: Sequence["WeightGroup"]) -> Table:
    """Weights by element type."""
    total = sum(group.nbytes for group in groups) or 1
    rows = tuple(
        (
            group.dtype,
            str(group.tensors),
            format_count(group.elements),
            format_bytes(group.nbytes),
            f"{100 * group.nbytes / total:.1f}%",
        )
        for group in groups
    )
    columns = ("dtype", "tensors", "elements", "size", "share")
    return Table("Weights", columns, rows, frozenset({1, 2, 3, 4}))


def host(document: Mapping[str, Any]) -> Table:
    """What this machine keeps of the bundle."""
    rows = [
        (printable(e["preparer"]), f"{format_bytes(e['size'])} in {printable(e['folder'])}")
        for e in document["prepared"]
    ]
    tuning = document["tuning"]
    if tuning is not None:
        rows.append(("settings", printable(", ".join(f"{k} {v}" for k, v in tuning.items()))))
    nothing = ("nothing yet", "made when a model is opened here for the first time")
    return Table("This machine", ("what", "value"), tuple(rows or [nothing]))


def files(manifest: Manifest) -> Table:
    """Every file with its size and the beginning of its hash."""
    rows = tuple((printable(f.path), format_bytes(f.size), f.sha256[:12]) for f in manifest.files)
    return Table("Files", ("file", "size", "sha256"), rows, frozenset({1}))
