"""inspect: the numbers in the picture, computed again here, on a bundle made here."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from trtllm_lite.runtime.bundle_files import describe_file
from trtllm_lite.runtime.host_cache import Preparer, host_cache
from trtllm_lite.runtime.manifest import (
    GraphSpec,
    KVLayer,
    KVSpec,
    Limits,
    Manifest,
    ModelFacts,
    Phase,
    Quantization,
    Source,
    TensorSpec,
)
from trtllm_lite.runtime.manifest_io import write_manifest
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.tools.cli import cli
from trtllm_lite.tools.inspect_tables import quantization_text
from trtllm_lite.tools.weights import WeightGroup, read_weights, weight_groups

LAYERS = (KVLayer(2, 8), KVLayer(2, 8, sliding_window=16), KVLayer(1, 4))
VOCAB = 16
CERTIFICATE = {
    "passed": False,
    "failure": "layer 1 departs",
    "gates": [{"name": "logits \x1b[2J", "passed": False, "value": 0.5, "limit": 0.002}],
}
EXTERNAL = {
    "embedding": ([VOCAB, 8], TensorProto.FLOAT, 512),
    "head": ([8, 3], TensorProto.INT8, 24),
}


def graph_spec(phase: Phase) -> GraphSpec:
    prefill = phase == "prefill"
    seq: int | str = "seq" if prefill else 1
    logits: int | str = "num_logits" if prefill else 1
    inputs = [
        TensorSpec("input_ids", "input_ids", "int64", ("batch", seq)),
        TensorSpec("past_lens", "past_lens", "int32", ("batch",)),
    ]
    if prefill:
        inputs.append(TensorSpec("query_lens", "query_lens", "int32", ("batch",)))
        inputs.append(TensorSpec("where", "logits_indices", "int64", ("batch", logits)))
    outputs = [TensorSpec("logits", "logits", "float32", ("batch", logits, VOCAB))]
    for i, layer in enumerate(LAYERS):
        shape = ("batch", layer.num_kv_heads, "capacity", layer.head_dim)
        inputs.append(TensorSpec(f"past_key_{i}", "past_key", "float32", shape, i))
        inputs.append(TensorSpec(f"past_value_{i}", "past_value", "float32", shape, i))
        outputs.append(TensorSpec(f"present_key_{i}", "present_key", "float32", shape, i))
        outputs.append(TensorSpec(f"present_value_{i}", "present_value", "float32", shape, i))
    return GraphSpec(phase, f"{phase}.onnx", tuple(inputs), tuple(outputs))


def onnx_model() -> onnx.ModelProto:
    """No nodes, two external weights at consecutive offsets, and one weight inside."""
    inside = numpy_helper.from_array(np.arange(4, dtype=np.int64), "inside")
    tensors, offset = [inside], 0
    for name, (dims, data_type, length) in EXTERNAL.items():
        tensor = TensorProto(name=name, dims=dims, data_type=data_type)
        tensor.data_location = TensorProto.EXTERNAL
        pairs = {"location": "weights.bin", "offset": str(offset), "length": str(length)}
        for key, value in pairs.items():
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
        offset += length
    return helper.make_model(helper.make_graph([], "g", [], [], initializer=tensors))


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[[bytes | None], Path]:
    """Writes a valid bundle, with those bytes as its certificate."""

    def make(certificate: bytes | None) -> Path:
        folder = tmp_path / "bundle"
        folder.mkdir()
        for phase in ("prefill", "decode"):
            (folder / f"{phase}.onnx").write_bytes(onnx_model().SerializeToString())
        (folder / "weights.bin").write_bytes(bytes(536))
        names = ["prefill.onnx", "decode.onnx", "weights.bin"]
        if certificate is not None:
            (folder / "parity.json").write_bytes(certificate)
            names.append("parity.json")
        manifest = Manifest(
            model=ModelFacts("llama", "LlamaForCausalLM", 152, 3, 8, VOCAB, 1, (2, 3)),
            source=Source("org/tiny", "safetensors", revision="main", license="mit"),
            target="cpu",
            dtype="float32",
            quantization=Quantization(),
            limits=Limits(max_num_seqs=4, max_model_len=64),
            kv=KVSpec("float32", LAYERS),
            graphs=(graph_spec("prefill"), graph_spec("decode")),
            weights="weights.bin",
            files=tuple(describe_file(folder, name) for name in names),
            producer={"torch": "2.13"},
        )
        write_manifest(folder, manifest)
        return folder

    return make


@pytest.fixture
def folder(make_bundle: Callable[[bytes | None], Path]) -> Path:
    return make_bundle(json.dumps(CERTIFICATE).encode())


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["inspect", *map(str, args)])


def test_weights_are_those_of_the_onnx_package(folder: Path) -> None:
    path = folder / "decode.onnx"
    read = {w.name: w for w in read_weights(path)}
    loaded = onnx.load(path, load_external_data=False).graph.initializer
    assert set(read) == {tensor.name for tensor in loaded}
    for tensor in loaded:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        assert read[tensor.name].shape == tuple(tensor.dims)
        assert read[tensor.name].dtype == dtype.name
        assert read[tensor.name].nbytes == dtype.itemsize * int(np.prod(tensor.dims))
    assert read["head"].place == ("weights.bin", "512")


def test_weights_that_graphs_share_count_once(folder: Path) -> None:
    both = [*read_weights(folder / "prefill.onnx"), *read_weights(folder / "decode.onnx")]
    assert weight_groups(both) == [
        WeightGroup("float32", 1, 128, 512),
        WeightGroup("int64", 1, 4, 32),
        WeightGroup("int8", 1, 24, 24),
    ]


def test_json_holds_the_manifest_and_what_follows_from_it(folder: Path) -> None:
    result = run(folder, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    per_token = sum(2 * layer.num_kv_heads * layer.head_dim * 4 for layer in LAYERS)
    assert document["kv"]["bytes_per_token"] == per_token
    assert document["kv"]["bytes_per_slot"] == per_token * 64
    assert document["kv"]["native_bytes_per_token"] == {}
    assert len(document["kv"]["layers"]) == len(LAYERS)
    assert document["manifest"]["graphs"][0]["inputs"][2]["name"] == "query_lens"
    assert document["weights"][0] == {
        "dtype": "float32",
        "tensors": 1,
        "elements": 128,
        "nbytes": 512,
    }
    assert document["certificate"] == CERTIFICATE


def test_the_picture_folds_the_layers(folder: Path) -> None:
    text = run(folder).stdout
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "in past_key_0 .. past_key_1 (2 layers) past_key float32 [batch, 2, capacity, 8]" in rows
    assert "in past_key_2 past_key float32 [batch, 1, capacity, 4]" in rows
    assert "in where logits_indices int64 [batch, num_logits]" in rows
    assert "a token 288 B" in rows
    assert "a slot of 64 tokens 18.0 KiB" in rows
    assert "all 4 slots 72.0 KiB" in rows
    assert "float32 1 128 512 B 90.1%" in rows
    assert "source org/tiny, safetensors, main, mit" in rows
    digest = hashlib.sha256((folder / "weights.bin").read_bytes()).hexdigest()
    assert f"weights.bin 536 B {digest[:12]}" in rows
    assert "Certificate: failed: layer 1 departs" in rows
    assert "logits \\x1b[2J FAIL 0.5 0.002" in rows
    assert "past_key_1 " not in text.replace(".. past_key_1 ", "")


def test_kv_shows_every_layer(folder: Path) -> None:
    rows = [" ".join(line.split()) for line in run(folder, "--kv").stdout.splitlines()]
    assert "in past_value_1 past_value float32 [batch, 2, capacity, 8]" in rows
    assert "1 2 8 16 128 B" in rows
    assert "2 1 4 full 32 B" in rows
    assert not any(".." in row for row in rows)


def test_kv_with_json_is_refused(folder: Path) -> None:
    assert run(folder, "--kv", "--json").exit_code == 2


def test_hashes_are_checked_unless_told_otherwise(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"x" * 536)
    refused = run(folder)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: files[2].sha256: ")
    assert run(folder, "--no-hash-check").exit_code == 0


def test_no_certificate_is_said(make_bundle: Callable[[bytes | None], Path]) -> None:
    folder = make_bundle(None)
    assert "Certificate: none" in run(folder).stdout
    assert json.loads(run(folder, "--json").stdout)["certificate"] is None


@pytest.mark.parametrize("data", [b"[1]", b"{", b'{"passed": NaN}', b"\xff"])
def test_a_broken_certificate_is_one_line(
    make_bundle: Callable[[bytes | None], Path], data: bytes
) -> None:
    result = run(make_bundle(data))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: parity.json: ")
    assert result.stderr.count("\n") == 1


def test_nothing_heavy_is_needed(folder: Path) -> None:
    blocked = ("torch", "transformers", "onnx", "onnxruntime", "tokenizers", "onnxscript")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked}))
from trtllm_lite.tools.cli import cli
cli.main(["inspect", {str(folder)!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Graph prefill" in done.stdout


def test_every_format_of_the_weights_is_shown() -> None:
    kept = {"a.weight": "int8_block64", "b.weight": "int8_block64"}
    formats = Quantization("int4_block32", "int4_block64", "int8_block64", "none", kept)
    assert quantization_text(formats) == (
        "prefill int4_block32, decode int4_block64, embedding int8_block64, lm_head none, "
        "2 weights int8_block64"
    )


def test_what_this_machine_keeps_is_shown(folder: Path) -> None:
    assert "nothing yet" in run(folder).stdout
    cache = host_cache(folder)

    def prepare(into: Path, _: Progress) -> None:
        (into / "w").write_bytes(bytes(2048))

    made = cache.prepared(Preparer("packer", "7", prepare))
    cache.remember("tuning", {"threads": 3, "spin": "off"})
    rows = [" ".join(line.split()) for line in run(folder).stdout.splitlines()]
    assert any(row.startswith("packer 2.") and row.endswith(f"KiB in {made}") for row in rows)
    assert "settings threads 3, spin off" in rows
    host = json.loads(run(folder, "--json").stdout)["host"]
    assert host["tuning"] == {"threads": 3, "spin": "off"}
    assert [e["folder"] for e in host["prepared"]] == [str(made)]
