"""`export`: the steps from a checkpoint to a finished bundle, top to bottom."""

import dataclasses
import resource
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
from tokenizers import Tokenizer

from trtllm_lite.exporter.capabilities import refuse_unsupported
from trtllm_lite.exporter.checkpoint import Checkpoint, open_checkpoint
from trtllm_lite.exporter.clock import Clock
from trtllm_lite.exporter.describe import NO_TOKENIZER, WEIGHTS, describe, file_entry
from trtllm_lite.exporter.external_data import bind, layout, write_weights
from trtllm_lite.exporter.gates import only_cache_failed
from trtllm_lite.exporter.graphs import Graphs, build_graphs, truncated
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.native.cache import AUTO
from trtllm_lite.exporter.native.write import write_native
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.quantize.apply import FormatSize, Prepared, prepare
from trtllm_lite.exporter.quantize.calibrate import NOT_CALIBRATED, Calibrated, Text, calibrate
from trtllm_lite.exporter.quantize.rewrite import find_linears
from trtllm_lite.exporter.scout.apply import put_islands, scout_prompts
from trtllm_lite.exporter.tokenizer_files import TokenizerFiles, write_tokenizer_files
from trtllm_lite.exporter.weight_names import check_shapes, match_names, refuse_unused, renamed
from trtllm_lite.exporter.weights import MappedSource
from trtllm_lite.exporter.workspace import check_output, check_space, workspace
from trtllm_lite.runtime.errors import UsageError, VerificationError
from trtllm_lite.runtime.kv_dtype import KVDtype
from trtllm_lite.runtime.manifest import PARITY_NAME, Limits, Manifest
from trtllm_lite.runtime.manifest_io import write_manifest
from trtllm_lite.runtime.native_table import PLAIN_CACHE
from trtllm_lite.runtime.progress import Progress

# What each request tries, in order, until a certificate passes.
ATTEMPTS = {"auto": ("int8", "none")}
# Weights alone in 8 bits lose nothing that a calibration text could win back.
TENSORRT_INT8 = ("tensorrt", "int8")


@dataclass(frozen=True)
class ExportReport:
    """What an export did. `output` is None for a dry run; `seconds` are per step;
    `peak_rss_bytes` is the process's largest resident memory at the end of the writing, before
    the reference model was loaded to verify; calibration has loaded it already. `formats`: what
    each weight format takes. `quantize`: what was made, and `why` when the options left it open.
    `kv_dtypes`: caches that the native graphs have, first the one that they are made for."""

    output: Path | None
    manifest: Manifest
    seconds: dict[str, float]
    peak_rss_bytes: int
    weight_bytes: int
    counts: dict[str, int] = field(default_factory=dict)
    parity: dict[str, Any] | None = None
    formats: tuple[FormatSize, ...] = ()
    quantize: str = "none"
    why: str = ""
    kv_dtypes: tuple[KVDtype, ...] = (PLAIN_CACHE,)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            **dataclasses.asdict(self),
            "output": None if self.output is None else str(self.output),
        }


class CacheLossError(VerificationError):
    """All gates passed but those of a cache of fewer bits than float32."""


@dataclass(frozen=True)
class _Job:
    """What the attempts of one export share: the float graphs and where their weights are."""

    checkpoint: Checkpoint
    graphs: Graphs
    limits: Limits
    source: MappedSource


def export(options: ExportOptions, progress: Progress) -> ExportReport:
    """Make a bundle from a checkpoint, all or nothing.

    Raises CheckpointError, UnsupportedError, UsageError before any work; VerificationError when a
    gate fails, in which case no bundle is left.
    """
    clock = Clock(progress)
    if not options.dry_run:
        check_output(options.output, overwrite=options.overwrite)
    job = _open(options, clock)
    attempts = ATTEMPTS.get(options.quantize, (options.quantize,))
    failures: list[str] = []
    for quantize in attempts[:-1]:
        try:
            return _attempt_caches(options, quantize, job, clock, "")
        except VerificationError as error:
            failures.append(f"{quantize} failed: {error}")
            clock.note(f"{failures[-1]}; trying {attempts[len(failures)]}")
    return _attempt_caches(options, attempts[-1], job, clock, "; ".join(failures))


def _open(options: ExportOptions, clock: Clock) -> _Job:
    clock.step("open the checkpoint")
    checkpoint = open_checkpoint(options.model, options.revision, clock)
    config = truncated(checkpoint.config, options.num_layers)
    refuse_unsupported(config)
    limits = Limits(options.max_num_seqs, longest_sequence(config, options.max_model_len))
    target = find_target(options.target, options.attention)
    graphs = build_graphs(config, target, limits.max_model_len, clock, options.dtype)
    return _Job(checkpoint, graphs, limits, _source(checkpoint, graphs, options))


def _attempt_caches(
    options: ExportOptions, quantize: str, job: _Job, clock: Clock, why: str
) -> ExportReport:
    """`_attempt`, and once more with a float32 cache where only another one loses too much and
    nobody asked for it by name."""
    try:
        return _attempt(options, quantize, job, clock, why)
    except CacheLossError as error:
        if options.kv_dtype != AUTO:
            raise
        clock.note(f"{error}; trying a float32 cache")
    plain = dataclasses.replace(options, kv_dtype=PLAIN_CACHE)
    return _attempt(plain, quantize, job, clock, why)


def _attempt(
    asked: ExportOptions, quantize: str, job: _Job, clock: Clock, why: str
) -> ExportReport:
    """One bundle. Raises VerificationError when its certificate fails."""
    prefill = None if quantize == "none" else asked.prefill_format
    options = dataclasses.replace(asked, quantize=quantize, prefill_format=prefill)
    asks_more = options.target != "cpu" or options.kv_dtype not in (AUTO, PLAIN_CACHE)
    if options.dry_run or asks_more:
        # Before any work: what cannot be had is refused.
        prepared = _prepared(options, job)
    if options.dry_run:
        manifest = describe(options, job.checkpoint, prepared, job.limits, NO_TOKENIZER, ())
        return _report(None, manifest, clock, prepared, options.quantize, why)
    with workspace(options.output, overwrite=options.overwrite) as folder:
        clock.step("write the tokenizer")
        tokenizer = write_tokenizer_files(job.checkpoint, folder)
        calibrated = _calibrated(options, job, folder, tokenizer, clock)
        prepared = _prepared(options, job, calibrated.keep_int8)
        manifest = _write(options, job, prepared, calibrated, tokenizer, folder, clock)
        report = _report(options.output, manifest, clock, prepared, options.quantize, why)
        parity = None
        if options.verify:
            parity = _verify(options, job.checkpoint, folder, manifest, clock)
        clock.step("put the bundle in place")
    clock.step("")
    return dataclasses.replace(report, parity=parity, seconds=clock.seconds)


def _prepared(options: ExportOptions, job: _Job, keep_int8: Collection[str] = ()) -> Prepared:
    prepared = prepare(
        job.graphs,
        options.quantize,
        options.dtype,
        options.prefill_format,
        keep_int8,
        options.kv_dtype,
    )
    for model in prepared.graphs.models:
        prepared.graphs.target.refuse(model)
    return prepared


def _calibrated(
    options: ExportOptions, job: _Job, folder: Path, tokenizer: TokenizerFiles, progress: Progress
) -> Calibrated:
    """What the calibration text says, where it is asked."""
    if options.quantize in ("none", "fp8") or (options.target, options.quantize) == TENSORRT_INT8:
        return NOT_CALIBRATED
    encode = None if tokenizer.tokenizer is None else _encoder(folder / tokenizer.tokenizer)
    vocab_size = job.graphs.skeleton.model.config.vocab_size
    text = Text(encode, vocab_size, job.limits.max_model_len)
    weights = find_linears(job.graphs.models)
    layers = job.graphs.kv.layers
    return calibrate(options, job.checkpoint, weights, layers, text, progress)


def _encoder(path: Path) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: list(tokenizer.encode(text).ids)


def _write(
    options: ExportOptions,
    job: _Job,
    prepared: Prepared,
    calibrated: Calibrated,
    tokenizer: TokenizerFiles,
    folder: Path,
    progress: Progress,
) -> Manifest:
    """Write everything but the certificate; the manifest last."""
    stored, graphs = prepared.stored, prepared.graphs
    check_space(folder, layout(stored)[1] + 64 * 2**20)
    progress.step("write the weights")
    source = job.source.scaled(calibrated.scalings)
    written = write_weights(folder / WEIGHTS, stored, source, calibrated.quantizer, progress)
    progress.step("write the graphs")
    for model in graphs.models:
        bind(model, stored, WEIGHTS)
    wide = _put_islands(options, job, graphs, tokenizer, folder, progress)
    for spec, model in zip(graphs.specs, graphs.models, strict=True):
        ir.save(model, folder / spec.file)
    for graph in _different(folder / spec.file for spec in graphs.specs):
        if told := graphs.target.check(graph):
            progress.note(told)
    names = [s.file for s in graphs.specs]
    if prepared.native is not None:
        places, kinds = layout(stored)[0], prepared.kv_dtypes
        names += write_native(folder, prepared.native, places, kinds, calibrated.cache)
    names += [n for n in _tokenizer_names(tokenizer) if n is not None]
    files = (written, *(file_entry(folder, name) for name in names))
    manifest = describe(options, job.checkpoint, prepared, job.limits, tokenizer, files, wide)
    write_manifest(folder, manifest)
    return manifest


def _put_islands(
    options: ExportOptions,
    job: _Job,
    graphs: Graphs,
    tokenizer: TokenizerFiles,
    folder: Path,
    progress: Progress,
) -> frozenset[str]:
    """What float16 arithmetic keeps in float32, where it is looked for."""
    if options.dtype != "float16" or not graphs.target.computes_in_dtype or not options.scout:
        return frozenset()
    progress.step("look for values beyond float16")
    encode = None if tokenizer.tokenizer is None else _encoder(folder / tokenizer.tokenizer)
    vocab_size = graphs.skeleton.model.config.vocab_size
    prompts = scout_prompts(encode, vocab_size, job.limits.max_model_len)
    names = put_islands(graphs.specs, graphs.models, graphs.kv, folder, prompts, progress)
    if names:
        progress.note(f"{len(names)} values go beyond float16 and stay float32")
    return names


def _different(files: Iterable[Path]) -> list[Path]:
    """One file of those with the same content."""
    return list({file.read_bytes(): file for file in files}.values())


def _source(checkpoint: Checkpoint, graphs: Graphs, options: ExportOptions) -> MappedSource:
    """The checkpoint's tensors under the graphs' names, after checking that all fit."""
    model, aliases = graphs.skeleton.model, graphs.skeleton.aliases
    stored = checkpoint.weights(model)
    present = renamed(model, stored.names())
    parts = graphs.parts
    wanted = [name for names in parts.values() for name in names]
    keys = match_names(model, aliases, wanted, frozenset(present))
    if options.num_layers is None:
        refuse_unused(model, aliases, keys, frozenset(present))
    places = {name: present[key] for name, key in keys.items()}
    source = MappedSource(
        stored,
        places,
        parts,
        graphs.tables,
        graphs.offsets,
        arrangements=graphs.arrangements,
    )
    shapes = {name: graphs.skeleton.shapes[name] for name in wanted}
    check_shapes(shapes, {name: source.shape(name) for name in wanted})
    return source


def _verify(
    options: ExportOptions,
    checkpoint: Checkpoint,
    folder: Path,
    manifest: Manifest,
    progress: Progress,
) -> dict[str, Any]:
    """Make the certificate, and list it in the manifest. Raises VerificationError."""
    from trtllm_lite.exporter.verify import certify

    certificate = certify(folder, checkpoint, options, progress)
    if not certificate.passed:
        kind = CacheLossError if only_cache_failed(certificate.gates) else VerificationError
        raise kind(f"the bundle is not equal to its reference: {certificate.failure}")
    certificate.write(folder / PARITY_NAME)
    files = (*manifest.files, file_entry(folder, PARITY_NAME))
    write_manifest(folder, dataclasses.replace(manifest, files=files))
    return certificate.to_json()


def _report(
    output: Path | None,
    manifest: Manifest,
    clock: Clock,
    prepared: Prepared,
    quantize: str,
    why: str,
) -> ExportReport:
    clock.step("")
    return ExportReport(
        output=output,
        manifest=manifest,
        seconds=clock.seconds,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        weight_bytes=layout(prepared.stored)[1],
        counts=prepared.graphs.counts,
        formats=prepared.sizes,
        quantize=quantize,
        why=why,
        kv_dtypes=prepared.kv_dtypes,
    )


def longest_sequence(config: Any, asked: int | None) -> int:
    """Tokens of the longest sequence: what is asked for, or what the checkpoint declares. Raises
    UsageError where it declares less, or nothing and nothing is asked for."""
    declared: int | None = getattr(config, "max_position_embeddings", None)
    if declared is None:
        if asked is None:
            raise UsageError("--max-model-len: the checkpoint declares no context length; give one")
        return asked
    if asked is not None and asked > declared:
        raise UsageError(f"--max-model-len: got {asked}; the checkpoint declares {declared}")
    return declared if asked is None else asked


def _tokenizer_names(files: TokenizerFiles) -> tuple[str | None, ...]:
    return files.tokenizer, files.chat_template, files.generation_config
