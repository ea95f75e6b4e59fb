"""What is outlined from a configuration is what an export writes."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from pathlib import Path

import onnx_ir as ir
import pytest

from trtllm_lite.exporter.checkpoint import open_config
from trtllm_lite.exporter.external_data import layout
from trtllm_lite.exporter.graphs import Graphs
from trtllm_lite.exporter.native.write import write_native
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.outline import Outline, outline
from trtllm_lite.exporter.quantize.apply import prepare
from trtllm_lite.exporter.quantize.plan import Linear
from trtllm_lite.exporter.quantize.rewrite import find_linears
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.engines.memory import weights_of
from trtllm_lite.runtime.errors import CheckpointError, UnsupportedError, UsageError
from trtllm_lite.runtime.native_table import TABLE_NAME, from_json
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.tools.plan_bundle import bundle_workloads, graph_weights, widest

Outlined = Callable[..., Outline]


@pytest.fixture
def outlined(
    tiny_checkpoint: Path, fresh_graphs: Callable[[], Graphs], monkeypatch: pytest.MonkeyPatch
) -> Outlined:
    """The outline of `tiny_checkpoint`, traced once for all tests."""
    monkeypatch.setattr("trtllm_lite.exporter.outline.build_graphs", lambda *_args: fresh_graphs())

    def make(quantize: str = "none", kv_dtype: str = "float32") -> Outline:
        options = ExportOptions(
            model=str(tiny_checkpoint),
            output=Path("unused"),
            quantize=quantize,
            kv_dtype=kv_dtype,
            dry_run=True,
        )
        return outline(options, NoProgress())

    return make


def test_bytes_are_those_of_the_bundle(outlined: Outlined, tiny_bundle: Path) -> None:
    found, bundle = outlined(), open_bundle(tiny_bundle)
    manifest = bundle.manifest
    assert found.workload.weight_bytes == (tiny_bundle / manifest.weights).stat().st_size
    assert found.workload.kv_token_bytes == manifest.kv.bytes_per_token
    assert found.num_parameters == manifest.model.num_parameters
    assert found.max_model_len == manifest.limits.max_model_len
    weights = graph_weights(bundle)
    assert found.weights == weights
    assert weights.of("decode") == weights_of(bundle, manifest.graph("decode"))
    assert found.graphs == manifest.graphs
    assert found.widest == widest(bundle)
    assert found.native is None


def test_a_finished_bundle_asks_for_the_same(outlined: Outlined, tiny_bundle: Path) -> None:
    expected = outlined().workload
    bundle = open_bundle(tiny_bundle)
    found, native = bundle_workloads(bundle)
    hidden, layers = bundle.manifest.model.hidden_size, len(bundle.manifest.kv.layers)
    assert native is None
    # It counts the few integers that lie in the graph as well.
    assert 0 <= found.step_bytes - expected.step_bytes < 256
    assert found.head_products == expected.head_products
    # A bundle counts the norms' parameters too, two a layer and one at the end.
    assert found.body_products - expected.body_products == (2 * layers + 1) * hidden
    assert found.attention_width == expected.attention_width
    assert found.layers == expected.layers


def test_packed_bytes_are_those_of_the_native_table(
    outlined: Outlined, fresh_graphs: Callable[[], Graphs], tmp_path: Path
) -> None:
    found = outlined("int8", "float16").native
    assert found is not None
    prepared = prepare(fresh_graphs(), "int8", "float32", kv_dtype="float16")
    assert prepared.native is not None
    write_native(tmp_path, prepared.native, layout(prepared.stored)[0])
    table = from_json((tmp_path / TABLE_NAME).read_bytes())
    assert found.weight_bytes == table.size
    packings = [weight.packing for weight in table.weights]
    assert all(packing.bits == 8 for packing in packings)
    sizes = [prod(p.codes_shape) + 2 * prod(p.scale_shape) for p in packings]
    assert found.step_bytes == sum(sizes)
    assert found.kv_dtype == "float16"


def test_fewer_bits_are_fewer_bytes(outlined: Outlined) -> None:
    sizes = [outlined(quantize).workload.step_bytes for quantize in ("none", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 3 * sizes[1]


def test_an_embedding_of_its_own_is_looked_up_not_read(
    outlined: Outlined, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = outlined()

    def apart(models: Iterable[ir.Model]) -> tuple[Linear, ...]:
        found = find_linears(models)
        return tuple(
            replace(w, is_linear=False, is_head=False) if w.is_embedding else w for w in found
        )

    monkeypatch.setattr("trtllm_lite.exporter.outline.find_linears", apart)
    table = 4 * both.workload.head_products
    assert outlined().workload.step_bytes == both.workload.step_bytes - table
    assert outlined().workload.weight_bytes == both.workload.weight_bytes


def test_only_the_configuration_is_needed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    assert open_config(str(tmp_path), None, NoProgress()).model_type == "llama"


def test_a_hub_id_is_asked_for_its_configuration_alone(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(tiny_checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert open_config("owner/name", "main", NoProgress()).model_type == "llama"
    assert asked == [("owner/name", "main", ["config.json"])]


def test_what_export_refuses_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a hub id"):
        open_config("no such folder", None, NoProgress())
    with pytest.raises(UsageError, match="--revision"):
        open_config(str(tiny_checkpoint), "main", NoProgress())
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    experts = config | {"model_type": "mixtral", "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    options = ExportOptions(model=str(tmp_path), output=tmp_path, dry_run=True)
    with pytest.raises(UnsupportedError):
        outline(options, NoProgress())
    longer = replace(options, model=str(tiny_checkpoint), max_model_len=10**6)
    with pytest.raises(UsageError, match="--max-model-len: got 1000000"):
        outline(longer, NoProgress())
