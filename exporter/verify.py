"""`verify`: compare a bundle with its reference and write the parity certificate.

Where reference and session do not fit in memory together, a bundle of the first layers is made
from the same checkpoint and compared instead, and the certificate says so.
"""

import dataclasses
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy.typing as npt
import psutil

from trtllm_lite.exporter.bundle_options import options_of
from trtllm_lite.exporter.certificate import Certificate, Gate, QualityRecord
from trtllm_lite.exporter.checkpoint import Checkpoint, open_checkpoint
from trtllm_lite.exporter.checks import Checks, Findings
from trtllm_lite.exporter.diagnose import (
    DEPARTS,
    HALF_DEPARTS,
    QUANTIZED_DEPARTS,
    first_departure,
)
from trtllm_lite.exporter.gates import (
    NATIVE_PHASES,
    exact_gates,
    half_gates,
    is_quantized,
    only_cache_failed,
    quality_records,
    quantized_gates,
)
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.prompts import Prompt, make_prompts, random_prompt
from trtllm_lite.exporter.quality.phases import PhaseQuality, measure_long, measure_phases
from trtllm_lite.exporter.quality.texts import LONG_LAST, WINDOW, long_window, text_windows
from trtllm_lite.exporter.reference import Reference, load_reference, needed_bytes
from trtllm_lite.exporter.rounded.session import computes_in_half, open_rounded
from trtllm_lite.runtime.backends import open_for_proof
from trtllm_lite.runtime.backends.base import Session, SessionOptions
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.host_cache import host_cache
from trtllm_lite.runtime.manifest import KVSpec, Manifest, Quantization
from trtllm_lite.runtime.native_weights import cache_dtypes
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.runtime.tokenizer import Tokenizer

Array = npt.NDArray[Any]
NEW_TOKENS = 64
CHUNKS = (7, 32, 64)
# Enough of the text for any tokenizer; one of few words would make it long.
TEXT_TOKENS = 4096
# Gates that say how much a format loses, and nothing else.
LOSSES = {
    f"{phase}_{measure}"
    for phase in ("prefill", "decode", *NATIVE_PHASES)
    for measure in ("perplexity", "top1")
}


def verify_bundle(
    folder: Path, reference: str | None, progress: Progress, *, check_hashes: bool = True
) -> Certificate:
    """Verify a finished bundle against a checkpoint. Raises UsageError when `reference` is needed:
    a bundle records the name of its checkpoint, not the place."""
    bundle = open_bundle(folder, check_hashes=check_hashes)
    source = bundle.manifest.source
    if reference is None:
        if "/" not in source.id:
            raise UsageError(
                f"--reference: the bundle was made from {source.id!r}; give its place on this "
                "machine (a Hugging Face folder, hub id or GGUF file)"
            )
        reference = source.id
    revision = source.revision if reference == source.id else None
    checkpoint = open_checkpoint(reference, revision, progress)
    _same_model(checkpoint, bundle.manifest)
    options = options_of(bundle, reference, folder)
    return certify(folder, checkpoint, options, progress)


def certify(
    folder: Path, checkpoint: Checkpoint, options: ExportOptions, progress: Progress
) -> Certificate:
    """Compare the bundle in `folder` with `checkpoint`, as exported with `options`."""
    manifest = open_bundle(folder, check_hashes=False).manifest
    layers = _layers_that_fit(manifest)
    if layers == manifest.model.num_layers:
        return _certify(folder, checkpoint, options, manifest.model.num_layers, progress)
    progress.note(f"the reference does not fit in memory: verifying the first {layers} layers")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".verify-") as temporary:
        short = _export_first_layers(options, layers, Path(temporary) / "bundle", progress)
        shorter = dataclasses.replace(options, num_layers=layers)
        return _certify(short, checkpoint, shorter, manifest.model.num_layers, progress)


def _certify(
    folder: Path,
    checkpoint: Checkpoint,
    options: ExportOptions,
    num_layers: int,
    progress: Progress,
) -> Certificate:
    began = time.monotonic()
    bundle = open_bundle(folder, check_hashes=False)
    progress.step("load the reference")
    reference = load_reference(checkpoint, options.dtype, options.num_layers)
    progress.step("open the bundle")
    capacity = bundle.manifest.limits.max_model_len + max(CHUNKS)
    session = _open(bundle, SessionOptions(num_slots=4, capacity=capacity, kernels="onnxruntime"))
    try:
        checks = Checks(session, reference, bundle.manifest.kv.recompute_at, progress)
        findings = _run(checks, bundle, checkpoint.config, progress)
        gates, records = _judge(checks, findings, bundle)
    finally:
        session.close()
    failure = None
    if not all(gate.passed for gate in gates):
        progress.step("find the first layer that departs")
        failure = _failure(gates, _cause(bundle, reference, gates, findings))
    return Certificate(
        gates=gates,
        prompts=tuple(findings.prompts),
        skipped=tuple(findings.skipped),
        quality=records,
        logit_scale=findings.logit_scale,
        reference=_reference_name(checkpoint, options.dtype),
        arithmetic=_arithmetic(bundle.manifest),
        num_layers=num_layers,
        layers_verified=bundle.manifest.model.num_layers,
        failure=failure,
        tools=bundle.manifest.producer,
        seconds=round(time.monotonic() - began, 1),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _open(bundle: Bundle, options: SessionOptions) -> Session:
    """What computes on this machine what the bundle's graphs say, each rounding included."""
    if computes_in_half(bundle.manifest):
        return open_rounded(bundle, options)
    return open_for_proof(bundle, options)


def _arithmetic(manifest: Manifest) -> str:
    dtype = manifest.kv.dtype
    if computes_in_half(manifest):
        return f"float32 on the CPU, each value rounded to {dtype}"
    return f"{dtype} on the CPU"


def _run(checks: Checks, bundle: Bundle, config: Any, progress: Progress) -> Findings:
    limits, vocab = bundle.manifest.limits, bundle.manifest.model.vocab_size
    new_tokens = max(1, min(NEW_TOKENS, limits.max_model_len // 2))
    longest = max(1, limits.max_model_len - new_tokens)
    prompts = make_prompts(bundle, longest)
    findings = Findings()
    progress.step("compare greedy tokens and logits")
    far = []
    for length in _boundaries(bundle.manifest.kv, config, longest):
        if _reference_holds(config, length + new_tokens):
            far.append(random_prompt(f"past {length}", vocab, length))
        else:
            findings.skipped.append(f"past {length}")
            progress.note(f"a prompt of {length} tokens is too long for the reference's memory")
    checks.greedy_against_reference([*prompts, *far], new_tokens, findings)
    progress.step("compare batched with alone")
    checks.alone(_short(prompts), min(16, new_tokens), findings)
    progress.step("compare chunked with whole, decode with prefill")
    for prompt in [_median(prompts), *far]:
        checks.chunked(prompt, CHUNKS, findings)
        checks.decode_equals_prefill(prompt, findings)
    return findings


def _boundaries(kv: KVSpec, config: Any, longest: int) -> list[int]:
    """Prompt lengths just past every sliding window and past the original context of a rope
    scaling; on both sides of a rope's switch: one that crosses while decoding, one beyond."""
    windows = {x.sliding_window for x in kv.layers if x.sliding_window is not None}
    lengths = [w + 5 for w in sorted(windows)]
    if kv.recompute_at is not None:
        lengths += [kv.recompute_at - 3, kv.recompute_at + 5]
    else:
        lengths += [n + 5 for n in sorted(_original_contexts(config))]
    return [n for n in lengths if 1 <= n <= longest]


def _original_contexts(config: Any) -> set[int]:
    """Context lengths before rope scaling, of the whole model or of its layer types."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    found = (p.get("original_max_position_embeddings") for p in nested)
    return {int(n) for n in found if n}


def _reference_holds(config: Any, length: int) -> bool:
    """Whether half of the free memory holds what eager attention makes for one layer: scores and
    weights of every head, float32."""
    needed = 2 * 4 * int(config.num_attention_heads) * length * length
    return needed <= _free_bytes() // 2


def _free_bytes() -> int:
    return int(psutil.virtual_memory().available)


def _judge(
    checks: Checks, findings: Findings, bundle: Bundle
) -> tuple[tuple[Gate, ...], tuple[QualityRecord, ...]]:
    """The gates, after measuring what quantized weights cost on a text. The native kernels are ones
    that a machine may have or not: all else is proved without them."""
    manifest = bundle.manifest
    formats, vocab = manifest.quantization, manifest.model.vocab_size
    if not is_quantized(formats):
        half = computes_in_half(manifest)
        gates = half_gates(findings, manifest.kv.dtype) if half else exact_gates(findings)
        return gates, ()
    checks.progress.step("measure the quality on a text")
    encode = None if manifest.tokenizer is None else Tokenizer.from_bundle(bundle).encode
    windows = text_windows("quality", encode, vocab, min(WINDOW, manifest.limits.max_model_len))
    windows = windows[: max(1, TEXT_TOKENS // windows.shape[1])]
    quality = measure_phases(checks.session, checks.reference, windows, vocab, checks.progress)
    longest = long_window(encode, vocab, manifest.limits.max_model_len)
    native = _native_qualities(bundle, checks, windows, longest)
    text = "random ids" if encode is None else "quality.txt"
    gates = quantized_gates(findings, quality, formats, native)
    return gates, quality_records(quality, formats, text, native)


def _native_qualities(
    bundle: Bundle, checks: Checks, windows: Array, longest: Array | None
) -> dict[str, PhaseQuality]:
    """The quality under our own kernels by the type of the cache; empty where they cannot run this
    bundle."""
    capacity = windows.shape[1] if longest is None else max(windows.shape[1], len(longest))
    found: dict[str, PhaseQuality] = {}
    with tempfile.TemporaryDirectory(prefix="trtllm-lite-") as folder:
        cache = dataclasses.replace(host_cache(bundle.folder), roots=(Path(folder),))
        plain = SessionOptions(num_slots=4, capacity=capacity, kernels="native", host_cache=cache)
        for kind in cache_dtypes(bundle):
            try:
                session = open_for_proof(bundle, dataclasses.replace(plain, kv_dtype=kind))
            except UsageError:
                return {}
            checks.progress.step(f"measure the quality of the native kernels, {kind} cache")
            found[kind] = _quality_of(bundle, session, checks, windows, longest)
    return found


def _quality_of(
    bundle: Bundle, session: Session, checks: Checks, windows: Array, longest: Array | None
) -> PhaseQuality:
    """Closes the session."""
    vocab = bundle.manifest.model.vocab_size
    try:
        found = measure_phases(session, checks.reference, windows, vocab, checks.progress)
        if longest is None:
            return found
        long = measure_long(session, checks.reference, longest, LONG_LAST)
        return dataclasses.replace(found, long=long)
    finally:
        session.close()


def _cause(
    bundle: Bundle, reference: Reference, gates: tuple[Gate, ...], findings: Findings
) -> str:
    """What to look at, or what to do: a lossy format has no one layer that is wrong."""
    failed = {gate.name for gate in gates if not gate.passed}
    formats = bundle.manifest.quantization
    if is_quantized(formats) and failed <= LOSSES:
        if only_cache_failed(gates):
            return "the type of the KV cache loses too much: export with --kv-dtype float32"
        kinds = f"prefill {formats.prefill}, decode {formats.decode}"
        return f"the formats ({kinds}) lose too much: {_wider(formats)}"
    half = computes_in_half(bundle.manifest)
    departs = QUANTIZED_DEPARTS if is_quantized(formats) else HALF_DEPARTS if half else DEPARTS
    return first_departure(bundle, reference, findings.worst_tokens, departs)


def _wider(formats: Quantization) -> str:
    """What to export with instead."""
    if formats.decode.startswith("int4"):
        return "export with --quantize int8"
    if formats.prefill != formats.decode:
        return "export with --prefill-format same, or with --quantize none"
    return "export with --quantize none"


def _failure(gates: tuple[Gate, ...], departure: str) -> str:
    failed = "; ".join(
        f"{g.name} is {g.value:.3g} (limit {g.limit:.3g})" for g in gates if not g.passed
    )
    return f"{failed}; {departure}"


def _short(prompts: list[Prompt]) -> list[Prompt]:
    return sorted(prompts, key=lambda p: len(p.token_ids))[-5:-1]


def _median(prompts: list[Prompt]) -> Prompt:
    return sorted(prompts, key=lambda p: len(p.token_ids))[-2]


def _layers_that_fit(manifest: Manifest) -> int:
    """All layers when reference and session fit in the memory that is free, else fewer."""
    model, graphs = manifest.model, len(manifest.graphs)
    free = _free_bytes()
    if needed_bytes(model.num_parameters, graphs) <= free:
        return model.num_layers
    embedding = 2 * model.vocab_size * model.hidden_size
    per_layer = max(1, (model.num_parameters - embedding) // model.num_layers)
    for layers in range(model.num_layers - 1, 0, -1):
        if needed_bytes(embedding + layers * per_layer, graphs) <= free:
            return layers
    raise TrtllmLiteError(
        f"not even one layer of the reference fits in the {free / 1e9:.1f} GB of free memory; "
        "export with --no-verify, and verify on a larger machine"
    )


def _export_first_layers(
    options: ExportOptions, layers: int, output: Path, progress: Progress
) -> Path:
    from trtllm_lite.exporter.pipeline import export

    short = dataclasses.replace(
        options, output=output, num_layers=layers, verify=False, dry_run=False
    )
    export(short, progress)
    return output


def _same_model(checkpoint: Checkpoint, manifest: Manifest) -> None:
    got, want = checkpoint.config.model_type, manifest.model.model_type
    if got != want:
        raise UsageError(f"--reference: its model type is {got!r}, the bundle's {want!r}")


def _reference_name(checkpoint: Checkpoint, dtype: str) -> str:
    stored = "" if dtype == "float32" else f", weights rounded to {dtype}"
    return f"transformers eager, float32{stored}, {checkpoint.source.id}"
