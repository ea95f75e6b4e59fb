"""`verify`: compare a bundle with its reference and write the parity certificate.

Where reference and session do not fit in memory together, a bundle of the first layers is made
from the same checkpoint and compared instead, and the certificate says so.
"""

import dataclasses
import math
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from trtllm_lite.exporter.certificate import UNBOUNDED, Certificate, Gate, finite
from trtllm_lite.exporter.checkpoint import Checkpoint, open_checkpoint
from trtllm_lite.exporter.checks import Checks, Findings
from trtllm_lite.exporter.diagnose import first_departure
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.prompts import Prompt, make_prompts, random_prompt
from trtllm_lite.exporter.reference import load_reference, needed_bytes
from trtllm_lite.runtime.backends import open_session
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.manifest import KVSpec, Manifest
from trtllm_lite.runtime.progress import Progress

NEW_TOKENS = 64
CHUNKS = (7, 32, 64)
# Float32 sums in another order; relative to the largest logit.
LOGIT_TOLERANCE = 5e-5
KL_LIMIT = 1e-5


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
    options = _options_of(bundle.manifest, reference, folder)
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
    session = open_session(bundle, SessionOptions(num_slots=4, capacity=capacity))
    try:
        checks = Checks(session, reference, bundle.manifest.kv.recompute_at, progress)
        findings = _run(checks, bundle, checkpoint.config, progress)
    finally:
        session.close()
    gates = _gates(findings)
    failure = None
    if not all(gate.passed for gate in gates):
        progress.step("find the first layer that departs")
        failure = _failure(gates, first_departure(bundle, reference, findings.worst_tokens))
    return Certificate(
        gates=gates,
        prompts=tuple(findings.prompts),
        skipped=tuple(findings.skipped),
        logit_scale=findings.logit_scale,
        reference=_reference_name(checkpoint, options.dtype),
        num_layers=num_layers,
        layers_verified=bundle.manifest.model.num_layers,
        failure=failure,
        tools=bundle.manifest.producer,
        seconds=round(time.monotonic() - began, 1),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


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


def _gates(findings: Findings) -> tuple[Gate, ...]:
    scale = findings.logit_scale
    agreement = findings.agreed / findings.compared
    kl = max(p.kl for p in findings.prompts)
    gates = [
        Gate("greedy_tokens", agreement == 1.0, agreement, 1.0, "share of equal greedy tokens"),
        _at_most("logits_max_abs", findings.distances["logits"], LOGIT_TOLERANCE * scale),
        _at_most("logits_max_kl", kl, KL_LIMIT),
    ]
    for name in ("chunked_equals_whole", "decode_equals_prefill", "batched_equals_alone"):
        # What was never measured has not been proved.
        value = findings.distances.get(name, UNBOUNDED)
        gates.append(_at_most(name, value, LOGIT_TOLERANCE * scale))
    return tuple(gates)


def _at_most(name: str, value: float, limit: float) -> Gate:
    return Gate(name, math.isfinite(value) and value <= limit, finite(value), limit)


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
    model = manifest.model
    free = _free_bytes()
    if needed_bytes(model.num_parameters) <= free:
        return model.num_layers
    embedding = 2 * model.vocab_size * model.hidden_size
    per_layer = max(1, (model.num_parameters - embedding) // model.num_layers)
    for layers in range(model.num_layers - 1, 0, -1):
        if needed_bytes(embedding + layers * per_layer) <= free:
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


def _options_of(manifest: Manifest, reference: str, folder: Path) -> ExportOptions:
    return ExportOptions(
        model=reference,
        output=folder,
        target=manifest.target,
        dtype=manifest.dtype,
        max_model_len=manifest.limits.max_model_len,
        max_num_seqs=manifest.limits.max_num_seqs,
    )


def _same_model(checkpoint: Checkpoint, manifest: Manifest) -> None:
    got, want = checkpoint.config.model_type, manifest.model.model_type
    if got != want:
        raise UsageError(f"--reference: its model type is {got!r}, the bundle's {want!r}")


def _reference_name(checkpoint: Checkpoint, dtype: str) -> str:
    stored = "" if dtype == "float32" else f", weights rounded to {dtype}"
    return f"transformers eager, float32{stored}, {checkpoint.source.id}"
