"""What the values of a manifest must satisfy beyond their types.

Bounds are far above any model known and far below what would hurt: they stop a damaged or hostile
manifest before anything is allocated from its numbers.
"""

import re
from collections.abc import Collection, Iterator

from trtllm_lite.runtime.bundle_files import bare_name_problem, path_problem
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.graph_check import check_graphs
from trtllm_lite.runtime.manifest import MANIFEST_NAME, Manifest
from trtllm_lite.runtime.strict_json import shown

MAX_FILES = 10_000
MAX_SEQS = 65_536
MAX_MODEL_LEN = 2**24
MAX_LAYERS = 4_096
MAX_HEADS = 4_096
MAX_HEAD_DIM = 65_536
MAX_HIDDEN = 2**20
MAX_VOCAB = 2**24
MAX_PARAMETERS = 2**53
MAX_EOS = 1_024
MAX_PRODUCER = 64
MAX_OVERRIDES = 65_536
FLOAT_DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("slots",)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")


def check_manifest(manifest: Manifest) -> None:
    """Raises BundleError naming the first field whose value is impossible, absurd or unsafe."""
    for field, number, low, high in _numbers(manifest):
        if not low <= number <= high:
            raise BundleError(field, f"{number} is out of range; allowed: {low} to {high}")
    for field, count, low, high in _lengths(manifest):
        if not low <= count <= high:
            raise BundleError(field, f"has {count} entries; allowed: {low} to {high}")
    for field, word, allowed in _words(manifest):
        if not allowed and not _WORD.fullmatch(word):
            raise BundleError(field, f"{shown(word)} must be one short word")
        if allowed and word not in allowed:
            raise BundleError(field, f"{shown(word)} is not one of {', '.join(allowed)}")
    _check_source(manifest)
    _check_files(manifest)
    _check_references(manifest)
    check_graphs(manifest)


def _numbers(manifest: Manifest) -> Iterator[tuple[str, int, int, int]]:
    model, kv = manifest.model, manifest.kv
    yield "limits.max_num_seqs", manifest.limits.max_num_seqs, 1, MAX_SEQS
    yield "limits.max_model_len", manifest.limits.max_model_len, 1, MAX_MODEL_LEN
    yield "model.num_parameters", model.num_parameters, 1, MAX_PARAMETERS
    yield "model.num_layers", model.num_layers, 1, MAX_LAYERS
    yield "model.hidden_size", model.hidden_size, 1, MAX_HIDDEN
    yield "model.vocab_size", model.vocab_size, 1, MAX_VOCAB
    yield from _token_ids(manifest)
    if kv.recompute_at is not None:
        yield "kv.recompute_at", kv.recompute_at, 1, MAX_MODEL_LEN
    for i, layer in enumerate(kv.layers):
        yield f"kv.layers[{i}].num_kv_heads", layer.num_kv_heads, 1, MAX_HEADS
        yield f"kv.layers[{i}].head_dim", layer.head_dim, 1, MAX_HEAD_DIM
        if layer.sliding_window is not None:
            yield f"kv.layers[{i}].sliding_window", layer.sliding_window, 1, MAX_MODEL_LEN


def _lengths(manifest: Manifest) -> Iterator[tuple[str, int, int, int]]:
    yield "kv.layers", len(manifest.kv.layers), 1, manifest.model.num_layers
    yield "model.eos_token_ids", len(manifest.model.eos_token_ids), 0, MAX_EOS
    yield "files", len(manifest.files), 1, MAX_FILES
    yield "producer", len(manifest.producer), 0, MAX_PRODUCER
    yield "quantization.overrides", len(manifest.quantization.overrides), 0, MAX_OVERRIDES


def _token_ids(manifest: Manifest) -> Iterator[tuple[str, int, int, int]]:
    model, last = manifest.model, manifest.model.vocab_size - 1
    for i, token_id in enumerate(model.eos_token_ids):
        yield f"model.eos_token_ids[{i}]", token_id, 0, last
    for name, token in (("bos", model.bos_token_id), ("pad", model.pad_token_id)):
        if token is not None:
            yield f"model.{name}_token_id", token, 0, last


def _words(manifest: Manifest) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    yield "target", manifest.target, ()
    yield "model.model_type", manifest.model.model_type, ()
    yield "model.architecture", manifest.model.architecture, ()
    for name in ("prefill", "decode", "embedding", "lm_head"):
        yield f"quantization.{name}", getattr(manifest.quantization, name), ()
    for weight, word in manifest.quantization.overrides.items():
        yield f"quantization.overrides[{shown(weight)}]", word, ()
    yield "dtype", manifest.dtype, FLOAT_DTYPES
    yield "kv.dtype", manifest.kv.dtype, FLOAT_DTYPES
    yield "kv.layout", manifest.kv.layout, LAYOUTS


def _check_source(manifest: Manifest) -> None:
    source = manifest.source
    parts = source.id.split("/")
    if not all(parts) or len(parts) > 2 or "\\" in source.id or ".." in parts:
        text = f"{shown(source.id)} must be a folder name, a hub id or a file name, not a path"
        raise BundleError("source.id", text)
    if source.sha256 is not None:
        _check_sha256("source.sha256", source.sha256)


def _check_files(manifest: Manifest) -> None:
    seen = {MANIFEST_NAME}
    for i, entry in enumerate(manifest.files):
        if problem := path_problem(entry.path):
            raise BundleError(f"files[{i}].path", problem)
        _check_sha256(f"files[{i}].sha256", entry.sha256)
        # Two names that differ in case only are one file on some file systems.
        if entry.path.casefold() in seen:
            text = f"{shown(entry.path)} is listed twice, or is {MANIFEST_NAME} itself"
            raise BundleError(f"files[{i}].path", text)
        seen.add(entry.path.casefold())


def _check_sha256(field: str, text: str) -> None:
    if not _SHA256.fullmatch(text):
        raise BundleError(field, f"{shown(text)} must be 64 lower-case hexadecimal digits")


def _check_references(manifest: Manifest) -> None:
    listed = {entry.path for entry in manifest.files}
    used: set[str] = set()
    for i, graph in enumerate(manifest.graphs):
        _check_beside(f"graphs[{i}].file", graph.file, listed, used)
        # ONNX Runtime reads another format, which nothing here checks, from other extensions.
        if not graph.file.endswith(".onnx"):
            raise BundleError(f"graphs[{i}].file", f"{shown(graph.file)} must end in .onnx")
    _check_beside("weights", manifest.weights, listed, used)
    for field in ("tokenizer", "chat_template", "generation_config"):
        name = getattr(manifest, field)
        if name is not None and name not in listed:
            raise BundleError(field, f"{shown(name)} is not in files")


def _check_beside(field: str, name: str, listed: Collection[str], used: set[str]) -> None:
    """Graphs and weights lie beside each other: the graphs name the weights by a bare name."""
    if problem := bare_name_problem(name):
        raise BundleError(field, problem)
    if name not in listed:
        raise BundleError(field, f"{shown(name)} is not in files")
    if name in used:
        raise BundleError(field, f"{shown(name)} is used twice; graphs and weights are apart")
    used.add(name)
