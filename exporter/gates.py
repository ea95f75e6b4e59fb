"""What was measured -> the gates of the certificate. All limits stand here.

A plain bundle computes what its reference computes, up to the order of float32 sums. A quantized
one does not: there the quality on a text is bounded by format, and what must hold exactly (rows do
not see each other, chunks are what one pass is) holds up to roundings that fall the other way.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from trtllm_lite.exporter.certificate import UNBOUNDED, Gate, QualityRecord, finite
from trtllm_lite.exporter.checks import Findings
from trtllm_lite.exporter.quality.measure import Quality
from trtllm_lite.exporter.quality.phases import PhaseQuality
from trtllm_lite.exporter.quantize.formats import (
    FP8_DQ,
    INT4_BLOCK32,
    INT4_BLOCK64,
    INT4_DQ,
    INT8_BLOCK32,
    INT8_BLOCK64,
    INT8_DQ,
    NONE,
    W8A8,
)
from trtllm_lite.runtime.kv_dtype import KVDtype
from trtllm_lite.runtime.manifest import Quantization
from trtllm_lite.runtime.native_table import PLAIN_CACHE

NATIVE = "native"
NO_NATIVE: Mapping[str, PhaseQuality] = MappingProxyType({})
NARROW_PHASES = tuple(f"{NATIVE}_{kind}" for kind in get_args(KVDtype) if kind != PLAIN_CACHE)
OF_PREFILL, OF_LONG = "_prefill", "_long"
NATIVE_PHASES = tuple(
    f"{p}{part}" for p in (NATIVE, *NARROW_PHASES) for part in ("", OF_PREFILL, OF_LONG)
)

# Float32 sums in another order; relative to the largest logit.
LOGIT_TOLERANCE = 5e-5
KL_LIMIT = 1e-5
# Half precision: what each layer rounds adds up; relative to the largest logit.
HALF_TOLERANCE = {"float16": 0.01, "bfloat16": 0.08}
HALF_MEAN_KL = {"float16": 1e-3, "bfloat16": 2e-2}
# Quantized: sums in another order now and then round an activation to its other neighbour.
ROUNDED_TOLERANCE = 0.05
# Prefill and decode then differ in kernels, and mostly in formats.
PHASES_TOLERANCE = 0.25
# Nats a token, mean of a prompt: far above any format's loss, far below a wrong position or mask.
PROMPT_KL_LIMIT = 0.7


@dataclass(frozen=True)
class Limits:
    """Worst quality that a format may have: perplexity over the reference's, and the share of
    positions with the reference's most likely token (None: no limit of its own)."""

    ppl_ratio: float
    top1: float | None = None


QUALITY: Mapping[str, Limits] = {
    NONE: Limits(1.001, 0.99),
    INT8_BLOCK32.name: Limits(1.010, 0.96),
    INT8_BLOCK64.name: Limits(1.010, 0.96),
    W8A8.name: Limits(1.025),
    # At least as good as llama.cpp's Q4_K_M of the same weights, 1.052 on its own text.
    INT4_BLOCK32.name: Limits(1.052),
    INT4_BLOCK64.name: Limits(1.052),
    **dict.fromkeys((f.name for f in INT8_DQ), Limits(1.010, 0.96)),
    **dict.fromkeys((f.name for f in INT4_DQ), Limits(1.052)),
    # Three bits of fraction: between the two.
    **dict.fromkeys((f.name for f in FP8_DQ), Limits(1.025)),
}


def exact_gates(findings: Findings) -> tuple[Gate, ...]:
    """The gates of a bundle whose weights are plain."""
    scale = findings.logit_scale
    agreement = findings.agreed / findings.compared
    kl = max(p.kl for p in findings.prompts)
    gates = [
        Gate("greedy_tokens", agreement == 1.0, agreement, 1.0, "share of equal greedy tokens"),
        at_most("logits_max_abs", findings.distances["logits"], LOGIT_TOLERANCE * scale),
        at_most("logits_max_kl", kl, KL_LIMIT),
    ]
    limit = LOGIT_TOLERANCE * scale
    for name in ("chunked_equals_whole", "decode_equals_prefill", "batched_equals_alone"):
        gates.append(_distance(findings, name, limit))
    return tuple(gates)


def half_gates(findings: Findings, dtype: str) -> tuple[Gate, ...]:
    """The gates of plain weights that are computed with in half precision. Where it chooses another
    token than the reference, the reference has to find both nearly as likely."""
    limit = HALF_TOLERANCE[dtype] * findings.logit_scale
    worst = max((p.mean_kl for p in findings.prompts), default=UNBOUNDED)
    meaning = "nats a token of the worst prompt"
    return (
        at_most("prompts_mean_kl", worst, HALF_MEAN_KL[dtype], meaning),
        at_most("logits_max_abs", findings.distances["logits"], limit),
        at_most("greedy_gap", findings.greedy_gap, limit),
        _distance(findings, "chunked_equals_whole", limit),
        _distance(findings, "decode_equals_prefill", limit),
        _distance(findings, "batched_equals_alone", limit),
    )


def quantized_gates(
    findings: Findings,
    quality: PhaseQuality,
    formats: Quantization,
    native: Mapping[str, PhaseQuality] = NO_NATIVE,
) -> tuple[Gate, ...]:
    """The gates of a bundle with quantized weights. native: under our own kernels, which use the
    decode format in both phases, by the type of the cache; empty where they cannot run."""
    scale = findings.logit_scale
    worst = max((p.mean_kl for p in findings.prompts), default=UNBOUNDED)
    meaning = "nats a token of the worst prompt"
    return (
        *_quality_gates("prefill", quality.prefill, formats.prefill),
        *_quality_gates("decode", quality.decode, formats.decode),
        *_native_gates(native, formats.decode),
        at_most("prompts_mean_kl", worst, PROMPT_KL_LIMIT, meaning),
        _distance(findings, "chunked_equals_whole", ROUNDED_TOLERANCE * scale),
        _distance(findings, "decode_equals_prefill", PHASES_TOLERANCE * scale),
        _distance(findings, "batched_equals_alone", ROUNDED_TOLERANCE * scale),
    )


def quality_records(
    quality: PhaseQuality,
    formats: Quantization,
    text: str,
    native: Mapping[str, PhaseQuality] = NO_NATIVE,
) -> tuple[QualityRecord, ...]:
    """What was measured, for the certificate."""
    phases = [
        ("prefill", formats.prefill, PLAIN_CACHE, quality.prefill),
        ("decode", formats.decode, PLAIN_CACHE, quality.decode),
        *((NATIVE, formats.decode, kind, found.decode) for kind, found in native.items()),
        *((NATIVE + OF_PREFILL, formats.decode, kind, q.prefill) for kind, q in native.items()),
        *(
            (NATIVE + OF_LONG, formats.decode, kind, q.long)
            for kind, q in native.items()
            if q.long is not None
        ),
    ]
    return tuple(
        QualityRecord(
            phase=phase,
            format=name,
            kv_dtype=kind,
            text=text,
            ppl=finite(q.ppl),
            ref_ppl=finite(q.ref_ppl),
            kl=finite(q.kl),
            top1=q.top1,
            num_tokens=q.num_tokens,
        )
        for phase, name, kind, q in phases
    )


def is_quantized(formats: Quantization) -> bool:
    return (formats.prefill, formats.decode) != (NONE, NONE)


def only_cache_failed(gates: Iterable[Gate]) -> bool:
    """Whether something failed, and nothing but what a cache of fewer bits loses."""
    failed = [gate.name for gate in gates if not gate.passed]
    return bool(failed) and all(name.startswith(NARROW_PHASES) for name in failed)


def _native_gates(native: Mapping[str, PhaseQuality], name: str) -> Iterator[Gate]:
    for kind, quality in native.items():
        phase = NATIVE if kind == PLAIN_CACHE else f"{NATIVE}_{kind}"
        yield from _quality_gates(phase, quality.decode, name)
        yield from _quality_gates(phase + OF_PREFILL, quality.prefill, name)
        if quality.long is not None:
            # A few hundred predictions: too few for a limit on which token is the likeliest.
            limit = max(QUALITY[name].ppl_ratio, QUALITY[W8A8.name].ppl_ratio)
            meaning = "perplexity over the reference's, late in a long prompt"
            yield at_most(f"{phase}{OF_LONG}_perplexity", quality.long.ppl_ratio, limit, meaning)


def at_most(name: str, value: float, limit: float, meaning: str = "") -> Gate:
    """Passes up to the limit; infinity and NaN never do."""
    return Gate(name, math.isfinite(value) and value <= limit, finite(value), limit, meaning)


def _quality_gates(phase: str, quality: Quality, name: str) -> Iterator[Gate]:
    limits = QUALITY[name]
    meaning = "perplexity over the reference's"
    yield at_most(f"{phase}_perplexity", quality.ppl_ratio, limits.ppl_ratio, meaning)
    if limits.top1 is not None:
        right = quality.top1 >= limits.top1
        meaning = "share of equal most likely tokens, at least"
        yield Gate(f"{phase}_top1", right, quality.top1, limits.top1, meaning)


def _distance(findings: Findings, name: str, limit: float) -> Gate:
    """What was never measured has not been proved."""
    return at_most(name, findings.distances.get(name, UNBOUNDED), limit)
