"""Which weight is stored in which format, for each phase.

The choice of a default is a small cost model: a decode step reads every weight once and is bound by
memory, a prefill chunk of 128 tokens is bound by multiplications.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from trtllm_lite.exporter.quantize.formats import (
    FORMATS,
    FP8_DQ,
    INT4_BLOCK32,
    INT4_DQ,
    INT8_BLOCK32,
    INT8_BLOCK64,
    INT8_DQ,
    NONE,
    W8A8,
    Format,
)
from trtllm_lite.runtime.manifest import Phase, Quantization

DTYPE_BYTES = {"float32": 4, "uint8": 1, "int8": 1}
CHUNK = 128
SAME = "same"


@dataclass(frozen=True)
class Linear:
    """A weight [rows, columns] that graphs multiply by (`is_linear`) or look tokens up in
    (`is_embedding`); a tied one is both. `parts`: the parameters it is made of, one after the
    other. `is_head`: it makes the logits."""

    name: str
    rows: int
    columns: int
    parts: tuple[str, ...]
    is_linear: bool = True
    is_embedding: bool = False
    is_head: bool = False


@dataclass(frozen=True)
class FormatPlan:
    """Formats by name, "none" is the plain dtype. `overrides` holds weights that have one format
    in both phases, whatever the defaults are."""

    prefill: str = NONE
    decode: str = NONE
    embedding: str = NONE
    lm_head: str = NONE
    overrides: Mapping[str, str] = field(default_factory=dict)

    def of(self, phase: Phase, weight: Linear) -> str:
        """The format of a weight that a graph multiplies by."""
        if weight.is_head:
            return self.lm_head
        default = self.prefill if phase == "prefill" else self.decode
        return self.overrides.get(weight.name, default)

    def to_manifest(self) -> Quantization:
        return Quantization(
            prefill=self.prefill,
            decode=self.decode,
            embedding=self.embedding,
            lm_head=self.lm_head,
            overrides=dict(sorted(self.overrides.items())),
        )


@dataclass(frozen=True)
class Rates:
    """What one core does with a format: GB/s of weights read at one row, and 1e9 multiplications
    and additions a second at `CHUNK` rows.

    The figures are of ONNX Runtime 1.32 on a Zen 4 core (AVX-512 VNNI). Only their ratios choose,
    and those hold wherever 8-bit dot products are fast.
    """

    read: float
    compute: float


RATES: Mapping[str, Rates] = {
    NONE: Rates(read=20.0, compute=107.0),
    INT8_BLOCK32.name: Rates(read=21.0, compute=142.0),
    "int8_block64": Rates(read=22.0, compute=160.0),
    W8A8.name: Rates(read=16.0, compute=358.0),
    INT4_BLOCK32.name: Rates(read=13.0, compute=122.0),
    "int4_block64": Rates(read=13.0, compute=129.0),
}
# Blocks of 64 decode a little faster and lose more: activations are rounded by the block as well.
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    "int8": (INT8_BLOCK32.name, W8A8.name),
    "int4": (INT4_BLOCK32.name,),
}
# Of embedding and lm_head. Beside 4-bit weights the rounding of 8 bits does not show, and a scale
# for 64 of them pays for more spared projections.
OUTER: Mapping[str, str] = {"int8": INT8_BLOCK32.name, "int4": INT8_BLOCK64.name}


def format_bytes_of(name: str, rows: int, columns: int) -> int:
    """Bytes of a weight in a format, plain float32 for "none"."""
    if name == NONE:
        return 4 * rows * columns
    parts = (p for p in FORMATS[name].parts if p.same_bytes_as is None)
    return sum(prod(p.shape(rows, columns)) * DTYPE_BYTES[p.dtype] for p in parts)


def estimated_ms(name: str, phase: Phase, weights: Iterable[Linear]) -> float:
    """Milliseconds of one core: a decode step of one row, or a prefill of CHUNK tokens."""
    total, rates = 0.0, RATES[name]
    for w in weights:
        if phase == "decode":
            total += format_bytes_of(name, w.rows, w.columns) / rates.read
        else:
            tokens = 1 if w.is_head else CHUNK
            total += 2 * w.rows * w.columns * tokens / rates.compute
    return total / 1e6


def plan_formats(
    quantize: str,
    weights: Collection[Linear],
    prefill_format: str | None = None,
    keep_int8: Collection[str] = (),
) -> FormatPlan:
    """The plan of `--quantize int8` or `int4`.

    prefill_format: "w8a8", "same" for one format in memory, or None for what is fastest without a
    second copy of 4-bit weights. keep_int8: names of weights that stay in int8 blocks in both
    phases: the sensitive ones at 4 bits, those with outlying activations under w8a8. Embedding and
    lm_head are int8 blocks in both phases, so that a tied pair is stored once and prefill, which
    computes few logits, adds nothing.
    """
    if quantize == NONE:
        return FormatPlan()
    bulk = [w for w in weights if w.is_linear and not w.is_head]
    candidates = CANDIDATES[quantize]
    decode = min(candidates, key=lambda name: estimated_ms(name, "decode", bulk))
    choices = {None: candidates, SAME: (decode,)}.get(prefill_format, (W8A8.name,))
    prefill = min(choices, key=lambda name: estimated_ms(name, "prefill", bulk))
    names = {w.name for w in bulk}
    if unknown := set(keep_int8) - names:
        raise ValueError(f"no such weights: {', '.join(sorted(unknown))}")
    kept = keep_int8 if {decode, prefill} != {INT8_BLOCK32.name} else ()
    return FormatPlan(
        prefill=prefill,
        decode=decode,
        embedding=OUTER[quantize] if any(w.is_embedding for w in weights) else NONE,
        lm_head=OUTER[quantize] if any(w.is_head for w in weights) else NONE,
        overrides=dict.fromkeys(sorted(kept), INT8_BLOCK32.name),
    )


DEQUANTIZED: Mapping[str, tuple[Format, ...]] = {"int8": INT8_DQ, "int4": INT4_DQ, "fp8": FP8_DQ}
"""Of each request, from large blocks to small."""


def plan_dequantized(
    quantize: str, weights: Collection[Linear], keep_int8: Collection[str] = ()
) -> FormatPlan:
    """The plan of `--quantize int8`, `int4` or `fp8` where DequantizeLinear makes floats of weights
    in every graph alike.

    The projections have the largest blocks that divide all of their columns, or those of 32; one
    that these do not divide stays plain. Embedding is plain, since whole tables would be made
    floats of for a few rows of them; lm_head is int8 beside int4.
    """
    if quantize == NONE:
        return FormatPlan()
    bulk = [w for w in weights if w.is_linear and not w.is_head]
    kind = _common(DEQUANTIZED[quantize], bulk)
    overrides = {w.name: _common(INT8_DQ, [w]).name for w in bulk if w.name in keep_int8}
    overrides |= {w.name: NONE for w in bulk if not _divides(kind, w)}
    heads = [w for w in weights if w.is_head]
    outer = INT8_DQ if quantize == "int4" else DEQUANTIZED[quantize]
    head = _common(outer, heads)
    fits = bool(heads) and all(_divides(head, w) for w in heads)
    return FormatPlan(
        prefill=kind.name,
        decode=kind.name,
        lm_head=head.name if fits else NONE,
        overrides=dict(sorted(overrides.items())),
    )


def _common(kinds: tuple[Format, ...], weights: Collection[Linear]) -> Format:
    """The first that divides all of the weights, or the last."""
    return next((k for k in kinds if all(_divides(k, w) for w in weights)), kinds[-1])


def _divides(kind: Format, weight: Linear) -> bool:
    return weight.columns % kind.block == 0
