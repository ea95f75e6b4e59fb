"""What an export writes into the manifest."""

import hashlib
import importlib.metadata
from collections.abc import Collection
from pathlib import Path

import trtllm_lite
from trtllm_lite.exporter.checkpoint import Checkpoint
from trtllm_lite.exporter.graphs import Graphs
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.quantize.apply import Prepared
from trtllm_lite.exporter.tokenizer_files import TokenizerFiles
from trtllm_lite.runtime.manifest import FileEntry, Limits, Manifest, ModelFacts

WEIGHTS = "weights.bin"
TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime")
# A dry run writes no files, so its manifest names none.
NO_TOKENIZER = TokenizerFiles(None, None, None, None, (), None)


def describe(
    options: ExportOptions,
    checkpoint: Checkpoint,
    prepared: Prepared,
    limits: Limits,
    tokenizer: TokenizerFiles,
    files: tuple[FileEntry, ...],
    float32_values: Collection[str] = (),
) -> Manifest:
    """The manifest of the graphs and files of one export."""
    return Manifest(
        model=_facts(prepared.graphs, tokenizer),
        source=checkpoint.source,
        target=options.target,
        dtype=options.dtype,
        quantization=prepared.plan.to_manifest(),
        limits=limits,
        kv=prepared.graphs.kv,
        graphs=prepared.graphs.specs,
        weights=WEIGHTS,
        files=files,
        tokenizer=tokenizer.tokenizer,
        chat_template=tokenizer.chat_template,
        generation_config=tokenizer.generation_config,
        float32_values=tuple(sorted(float32_values)),
        producer=_producer(),
    )


def file_entry(folder: Path, name: str) -> FileEntry:
    """Size and hash of a file of the bundle."""
    path = folder / name
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return FileEntry(name, path.stat().st_size, digest)


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


def _producer() -> dict[str, str]:
    versions = {"trtllm-lite": trtllm_lite.__version__}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
