"""`export`: the steps from a checkpoint to a finished bundle, top to bottom."""

import dataclasses
import hashlib
import importlib.metadata
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

import trtllm_lite
from trtllm_lite.exporter.capabilities import refuse_unsupported
from trtllm_lite.exporter.checkpoint import Checkpoint, open_checkpoint
from trtllm_lite.exporter.external_data import (
    IR_DTYPES,
    Placed,
    bind,
    iter_shapes,
    layout,
    write_weights,
)
from trtllm_lite.exporter.graphs import Graphs, build_graphs, truncated
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.passes import add_storage_casts
from trtllm_lite.exporter.tokenizer_files import TokenizerFiles, write_tokenizer_files
from trtllm_lite.exporter.weight_names import check_shapes, match_names, refuse_unused, renamed
from trtllm_lite.exporter.weights import MappedSource
from trtllm_lite.exporter.workspace import check_output, check_space, workspace
from trtllm_lite.runtime.errors import UsageError, VerificationError
from trtllm_lite.runtime.manifest import (
    PARITY_NAME,
    FileEntry,
    Limits,
    Manifest,
    ModelFacts,
    Quantization,
)
from trtllm_lite.runtime.manifest_io import write_manifest
from trtllm_lite.runtime.progress import Progress

WEIGHTS = "weights.bin"
TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime")


@dataclass(frozen=True)
class ExportReport:
    """What an export did. `output` is None for a dry run; `seconds` are per step;
    `peak_rss_bytes` is the process's largest resident memory at the end of the writing, before
    the reference model was loaded to verify."""

    output: Path | None
    manifest: Manifest
    seconds: dict[str, float]
    peak_rss_bytes: int
    weight_bytes: int
    counts: dict[str, int] = field(default_factory=dict)
    parity: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            **dataclasses.asdict(self),
            "output": None if self.output is None else str(self.output),
        }


@dataclass(frozen=True)
class _Weights:
    """Where every tensor comes from and where it goes; `size` is the weights file's, in bytes."""

    source: MappedSource
    places: dict[str, Placed]
    size: int


class _Clock:
    """A Progress that times the steps on their way to the real one."""

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._name, self._since = "", time.monotonic()
        self.seconds: dict[str, float] = {}

    def step(self, name: str) -> None:
        now = time.monotonic()
        if self._name:
            self.seconds[self._name] = round(now - self._since, 3)
        self._name, self._since = name, now
        if name:
            self._inner.step(name)

    def advance(self, done: int, total: int, unit: str) -> None:
        self._inner.advance(done, total, unit)

    def note(self, text: str) -> None:
        self._inner.note(text)


def export(options: ExportOptions, progress: Progress) -> ExportReport:
    """Make a bundle from a checkpoint, all or nothing.

    Raises CheckpointError, UnsupportedError, UsageError before any work; VerificationError when a
    parity gate fails, in which case no bundle is left.
    """
    clock = _Clock(progress)
    if not options.dry_run:
        check_output(options.output, overwrite=options.overwrite)
    clock.step("open the checkpoint")
    checkpoint = open_checkpoint(options.model, options.revision, clock)
    config = truncated(checkpoint.config, options.num_layers)
    refuse_unsupported(config)
    limits = Limits(options.max_num_seqs, _max_model_len(config, options.max_model_len))
    graphs = build_graphs(config, find_target(options.target), limits.max_model_len, clock)
    if options.dtype != "float32":
        for model in graphs.models:
            add_storage_casts(model, IR_DTYPES[options.dtype])
    weights = _weights(checkpoint, graphs, options)
    if options.dry_run:
        manifest = _manifest(options, checkpoint, graphs, limits, _no_tokenizer(checkpoint), ())
        return _report(None, manifest, clock, weights.size, graphs)
    with workspace(options.output, overwrite=options.overwrite) as folder:
        manifest = _write(options, checkpoint, graphs, limits, folder, weights, clock)
        report = _report(options.output, manifest, clock, weights.size, graphs)
        parity = _verify(options, checkpoint, folder, manifest, clock) if options.verify else None
        clock.step("put the bundle in place")
    clock.step("")
    return dataclasses.replace(report, parity=parity, seconds=clock.seconds)


def _write(
    options: ExportOptions,
    checkpoint: Checkpoint,
    graphs: Graphs,
    limits: Limits,
    folder: Path,
    weights: _Weights,
    progress: Progress,
) -> Manifest:
    """Write everything but the certificate; the manifest last."""
    check_space(folder, weights.size + 64 * 2**20)
    progress.step("write the tokenizer")
    tokenizer = write_tokenizer_files(checkpoint, folder)
    progress.step("write the weights")
    places, path = weights.places, folder / WEIGHTS
    written = write_weights(path, places, weights.source, options.dtype, progress)
    progress.step("write the graphs")
    for spec, model in zip(graphs.specs, graphs.models, strict=True):
        bind(model, places, WEIGHTS, options.dtype)
        ir.save(model, folder / spec.file)
    names = [s.file for s in graphs.specs]
    names += [n for n in _tokenizer_names(tokenizer) if n is not None]
    files = (written, *(_entry(folder, name) for name in names))
    manifest = _manifest(options, checkpoint, graphs, limits, tokenizer, files)
    write_manifest(folder, manifest)
    return manifest


def _weights(checkpoint: Checkpoint, graphs: Graphs, options: ExportOptions) -> _Weights:
    """The checkpoint's tensors under the graphs' names, after checking that all fit."""
    model, aliases = graphs.skeleton.model, graphs.skeleton.aliases
    stored = checkpoint.weights(model)
    present = renamed(model, stored.names())
    keys = match_names(model, aliases, graphs.weights, frozenset(present))
    if options.num_layers is None:
        refuse_unused(model, aliases, keys, frozenset(present))
    source = MappedSource(stored, {name: present[key] for name, key in keys.items()})
    check_shapes(dict(iter_shapes(graphs.weights)), {n: source.shape(n) for n in keys})
    places, size = layout(graphs.weights, options.dtype)
    return _Weights(source, places, size)


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
        raise VerificationError(f"the bundle is not equal to its reference: {certificate.failure}")
    certificate.write(folder / PARITY_NAME)
    files = (*manifest.files, _entry(folder, PARITY_NAME))
    write_manifest(folder, dataclasses.replace(manifest, files=files))
    return certificate.to_json()


def _manifest(
    options: ExportOptions,
    checkpoint: Checkpoint,
    graphs: Graphs,
    limits: Limits,
    tokenizer: TokenizerFiles,
    files: tuple[FileEntry, ...],
) -> Manifest:
    return Manifest(
        model=_facts(graphs, tokenizer),
        source=checkpoint.source,
        target=options.target,
        dtype=options.dtype,
        quantization=Quantization(),
        limits=limits,
        kv=graphs.kv,
        graphs=graphs.specs,
        weights=WEIGHTS,
        files=files,
        tokenizer=tokenizer.tokenizer,
        chat_template=tokenizer.chat_template,
        generation_config=tokenizer.generation_config,
        producer=_producer(),
    )


def _facts(graphs: Graphs, tokenizer: TokenizerFiles) -> ModelFacts:
    model, config = graphs.skeleton.model, graphs.skeleton.model.config
    return ModelFacts(
        model_type=config.model_type,
        architecture=type(model).__name__,
        num_parameters=graphs.num_parameters,
        num_layers=len(graphs.facts),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
    )


def _report(
    output: Path | None, manifest: Manifest, clock: _Clock, size: int, graphs: Graphs
) -> ExportReport:
    clock.step("")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return ExportReport(output, manifest, clock.seconds, peak, size, graphs.counts)


def _max_model_len(config: Any, asked: int | None) -> int:
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


def _no_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles:
    """A dry run writes no files, so its manifest names none."""
    return TokenizerFiles(None, None, None, None, (), None)


def _producer() -> dict[str, str]:
    versions = {"trtllm-lite": trtllm_lite.__version__}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _entry(folder: Path, name: str) -> FileEntry:
    path = folder / name
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return FileEntry(name, path.stat().st_size, digest)
