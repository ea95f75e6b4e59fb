"""`trtllm-lite inspect`: a readable picture of a bundle. Needs no torch, onnx or onnxruntime."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_lite.tools.command import console_of, option, subcommand
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.options import bundle_argument, hash_option, json_option

if TYPE_CHECKING:
    from trtllm_lite.runtime.bundle import Bundle
    from trtllm_lite.tools.weights import WeightGroup

EXAMPLES = (
    "trtllm-lite inspect smollm2",
    "trtllm-lite inspect smollm2 --kv                        # every layer's cache tensors",
    "trtllm-lite inspect smollm2 --json | jq .kv",
)
MAX_CERTIFICATE_BYTES = 8 * 2**20


@subcommand("inspect", examples=EXAMPLES)
@bundle_argument
@option("Bundle", "--kv", is_flag=True, help="Show the cache tensors of every layer.")
@hash_option
@json_option
@click.pass_context
def inspect(ctx: click.Context, /, bundle: str, kv: bool, hash_check: bool, json: bool) -> None:
    """Show what a bundle holds: graphs, inputs and outputs, KV cache, weights, certificate.

    Opening it checks it: a damaged or unsafe bundle is refused.
    """
    from trtllm_lite.runtime.bundle import open_bundle

    if json and kv:
        raise click.UsageError("--kv is for the tables; --json always holds every layer")
    opened = open_bundle(Path(bundle), check_hashes=hash_check)
    weights = _weights(opened)
    certificate = _certificate(opened)
    console = console_of(ctx)
    if json:
        console.json(_document(opened, weights, certificate) | {"host": _host(opened)})
    else:
        _show(console, opened, weights, certificate, every_layer=kv)


def _host(bundle: "Bundle") -> dict[str, Any]:
    """What this machine keeps of the bundle: prepared files, measured settings."""
    from trtllm_lite.runtime.host_cache import host_cache

    cache = host_cache(bundle.folder)
    prepared = [asdict(e) | {"folder": str(e.folder)} for e in cache.entries()]
    return {"prepared": prepared, "tuning": cache.recall("tuning")}


def _native_caches(bundle: "Bundle") -> dict[str, int]:
    """Bytes a token of the caches that the native graphs have, first the bundle's own choice."""
    from trtllm_lite.runtime.native_weights import cache_dtypes

    kv = bundle.manifest.kv
    return {kind: replace(kv, dtype=kind).bytes_per_token for kind in cache_dtypes(bundle)}


def _weights(bundle: "Bundle") -> list["WeightGroup"]:
    from trtllm_lite.tools.weights import read_weights, weight_groups

    graphs = bundle.manifest.graphs
    return weight_groups(w for graph in graphs for w in read_weights(bundle.folder / graph.file))


def _certificate(bundle: "Bundle") -> dict[str, Any] | None:
    """The certificate of the bundle, or None where it has none.

    Raises BundleError when there is one that cannot be read.
    """
    from trtllm_lite.runtime.errors import BundleError
    from trtllm_lite.runtime.manifest import PARITY_NAME
    from trtllm_lite.runtime.strict_json import parse

    if not bundle.has(PARITY_NAME):
        return None
    path = bundle.path(PARITY_NAME)
    if path.stat().st_size > MAX_CERTIFICATE_BYTES:
        raise BundleError(PARITY_NAME, f"has over {MAX_CERTIFICATE_BYTES} bytes")
    try:
        document = parse(path.read_bytes())
    except ValueError as error:
        raise BundleError(PARITY_NAME, str(error)) from None
    if not isinstance(document, dict):
        raise BundleError(PARITY_NAME, "must be a JSON object")
    return document


def _document(
    bundle: "Bundle", weights: list["WeightGroup"], certificate: dict[str, Any] | None
) -> dict[str, Any]:
    manifest = bundle.manifest
    per_token = manifest.kv.bytes_per_token
    return {
        "folder": str(bundle.folder),
        "manifest": asdict(manifest),
        "kv": {
            "bytes_per_token": per_token,
            "bytes_per_slot": per_token * manifest.limits.max_model_len,
            "native_bytes_per_token": _native_caches(bundle),
            "layers": [asdict(layer) for layer in manifest.kv.layers],
        },
        "weights": [asdict(group) for group in weights],
        "certificate": certificate,
    }


def _show(
    console: Console,
    bundle: "Bundle",
    weights: list["WeightGroup"],
    certificate: dict[str, Any] | None,
    *,
    every_layer: bool,
) -> None:
    from trtllm_lite.tools import inspect_tables as tables
    from trtllm_lite.tools.gates import gate_table

    manifest = bundle.manifest
    console.table(tables.facts(bundle))
    for graph in manifest.graphs:
        console.table(tables.graph_io(graph, every_layer=every_layer))
    console.table(tables.kv_cache(manifest, _native_caches(bundle)))
    if every_layer:
        console.table(tables.kv_layers(manifest))
    console.table(tables.weight_table(weights))
    console.table(tables.files(manifest))
    console.table(tables.host(_host(bundle)))
    if certificate is None:
        console.out("Certificate: none; make one with `trtllm-lite verify`.")
    else:
        console.table(gate_table(certificate))
