"""From a checkpoint to a bundle: what is in it, and that every other ending leaves nothing."""

import errno
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trtllm_lite.exporter.certificate import Certificate, Gate
from trtllm_lite.exporter.external_data import ALIGNMENT
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.runtime.backends import open_session
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError, VerificationError
from trtllm_lite.runtime.host_cache import FOLDER_NAME
from trtllm_lite.runtime.manifest import MANIFEST_NAME, Manifest, Phase
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.runtime.progress import NoProgress, Progress

PHASES: tuple[Phase, ...] = ("prefill", "decode")
ONNX_DTYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
}
TABLES = ("rotary.0.cos", "rotary.0.sin")
Copied = Callable[[Path], Path]


def run(checkpoint: Path, output: Path, progress: Progress | None = None, **more: Any) -> Any:
    options: dict[str, Any] = {"max_model_len": 32, "verify": False} | more
    return export(
        ExportOptions(model=str(checkpoint), output=output, **options), progress or NoProgress()
    )


def graph(bundle: Path, phase: Phase) -> onnx.ModelProto:
    return onnx.load(bundle / f"{phase}.onnx", load_external_data=False)


def external(model: onnx.ModelProto) -> dict[str, tuple[str, int, int]]:
    """Name -> file, offset, length of every initializer that is outside."""
    found = {}
    for tensor in model.graph.initializer:
        entries = {e.key: e.value for e in tensor.external_data}
        if entries:
            place = entries["location"], int(entries["offset"]), int(entries["length"])
            found[tensor.name] = place
    return found


def dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    shape = value.type.tensor_type.shape.dim
    return tuple(d.dim_param if d.HasField("dim_param") else d.dim_value for d in shape)


# The bundle


def files_of(bundle: Path) -> list[Path]:
    """What an export wrote: the host cache of a bundle that was opened since is not."""
    found = [path for path in bundle.iterdir() if path.name != FOLDER_NAME]
    assert all(path.is_file() for path in found)
    return found


def test_the_bundle_opens_with_hashes(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle, check_hashes=True)
    listed = {entry.path for entry in bundle.manifest.files}
    assert listed | {MANIFEST_NAME} == {p.name for p in files_of(tiny_bundle)}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= listed
    parity = json.loads((tiny_bundle / "parity.json").read_text())
    assert parity["passed"] is True
    assert len(parity["prompts"]) == 20
    assert {p["new_tokens"] for p in parity["prompts"]} == {64}


def test_facts_are_the_checkpoint_s(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    facts = manifest.model
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert (facts.model_type, facts.architecture) == ("llama", "LlamaForCausalLM")
    assert (facts.num_layers, facts.hidden_size) == (2, config["hidden_size"])
    assert (facts.bos_token_id, facts.eos_token_ids, facts.pad_token_id) == (1, (2,), 0)
    assert (manifest.limits.max_num_seqs, manifest.limits.max_model_len) == (4, 128)
    assert (manifest.source.id, manifest.source.format) == ("tiny-llama", "safetensors")
    assert {"torch", "transformers", "onnx", "trtllm-lite"} <= set(manifest.producer)


def test_one_weights_file_with_every_tensor_once(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    places = [external(graph(tiny_bundle, phase)) for phase in PHASES]
    shared = places[0].keys() & places[1].keys()
    assert shared == places[0].keys() == places[1].keys()
    assert all(places[0][name] == places[1][name] for name in shared)
    assert {file for file, _, _ in places[0].values()} == {"weights.bin"}
    spans = sorted((offset, offset + length) for _, offset, length in places[0].values())
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert spans[-1][1] == (tiny_bundle / "weights.bin").stat().st_size
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tables = sum(length for name, (_, _, length) in places[0].items() if name in TABLES)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    assert tables == 4 * 128 * head_dim
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(stop - start for start, stop in spans) == 4 * parameters + tables


def test_weights_are_the_checkpoint_s(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    stored = load_file(tiny_checkpoint / "model.safetensors")
    data = (tiny_bundle / "weights.bin").read_bytes()
    places = external(graph(tiny_bundle, "decode"))
    weights = {name: name.split("+") for name in places if name not in TABLES}
    assert sorted(part for parts in weights.values() for part in parts) == sorted(stored)
    for name, parts in weights.items():
        _, offset, length = places[name]
        want = b"".join(stored[part].float().numpy().tobytes() for part in parts)
        assert data[offset : offset + length] == want, name


@pytest.mark.parametrize("phase", PHASES)
def test_the_graph_is_its_table(tiny_bundle: Path, phase: Phase) -> None:
    table, proto = read_manifest(tiny_bundle).graph(phase), graph(tiny_bundle, phase).graph
    for specs, values in ((table.inputs, proto.input), (table.outputs, proto.output)):
        assert [spec.name for spec in specs] == [value.name for value in values]
        for spec, value in zip(specs, values, strict=True):
            assert dims(value) == spec.shape, spec.name
            assert value.type.tensor_type.elem_type == ONNX_DTYPES[spec.dtype]


def test_no_weight_is_inside_a_graph(tiny_bundle: Path) -> None:
    for phase in PHASES:
        inside = [t for t in graph(tiny_bundle, phase).graph.initializer if not t.external_data]
        assert sum(t.ByteSize() for t in inside) < 4096


def test_no_path_of_this_machine_is_in_the_bundle(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    paths = (tiny_checkpoint.parent, Path(torch.__file__).parent.parent, Path.cwd())
    for file in files_of(tiny_bundle):
        data = file.read_bytes()
        assert not [path for path in paths if str(path).encode() in data], file.name


def test_prefill_gives_logits_where_asked(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(0, 320, (2, 9))
    lens = np.array([9, 5], np.int32)
    indices = np.array([[8, 0, 3], [4, 4, 1]])
    zeros = np.zeros(2, np.int32)
    batch = Batch("prefill", 0, ids, zeros, lens, lens, indices)
    session = open_session(open_bundle(tiny_bundle), SessionOptions(num_slots=2, capacity=32))
    try:
        got = session.run(batch)
        assert got.shape == (2, 3, 320)
        for row in range(2):
            with torch.no_grad():
                want = model(torch.tensor(ids[row : row + 1, : lens[row]])).logits[0].numpy()
            np.testing.assert_allclose(got[row], want[indices[row]], atol=2e-4)
    finally:
        session.close()


# Options


def test_a_dry_run_writes_nothing(tiny_checkpoint: Path, tmp_path: Path, traced: None) -> None:
    report: ExportReport = run(tiny_checkpoint, tmp_path / "out", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert report.output is None
    assert report.parity is None
    assert isinstance(report.manifest, Manifest)
    assert report.manifest.files == ()
    assert [g.phase for g in report.manifest.graphs] == list(PHASES)
    assert report.weight_bytes > 4 * report.manifest.model.num_parameters
    assert json.loads(json.dumps(report.to_json()))["output"] is None


def test_max_model_len(tiny_checkpoint: Path, tmp_path: Path, traced: None) -> None:
    with pytest.raises(UsageError, match="got 129; the checkpoint declares 128"):
        run(tiny_checkpoint, tmp_path / "out", max_model_len=129)
    for asked, kept in ((128, 128), (1, 1), (None, 128)):
        report = run(tiny_checkpoint, tmp_path / "out", max_model_len=asked, dry_run=True)
        assert report.manifest.limits.max_model_len == kept


def test_a_checkpoint_that_declares_no_length(
    tiny_checkpoint: Path, tmp_path: Path, copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtllm_lite.exporter import pipeline

    monkeypatch.setattr(pipeline, "truncated", lambda *_args: Undeclared())
    monkeypatch.setattr(pipeline, "refuse_unsupported", lambda _config: None)
    with pytest.raises(UsageError, match="declares no context length; give one"):
        run(tiny_checkpoint, tmp_path / "out", max_model_len=None)


class Undeclared:
    """A configuration without a context length."""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtype": "int8"}, "--dtype: got 'int8'; allowed: auto, float32, float16, bfloat16"),
        ({"target": "npu"}, "--target: got 'npu'; allowed: cpu, cuda, tensorrt"),
        ({"max_model_len": 0}, "--max-model-len: got 0; allowed: 1 or more"),
        ({"max_num_seqs": 0}, "--max-num-seqs: got 0; allowed: 1 to 4096"),
        ({"max_num_seqs": 4097}, "--max-num-seqs: got 4097"),
    ],
)
def test_options_are_checked(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(tmp_path, tmp_path / "out", **wrong)


def test_an_output_that_is_taken_is_refused_before_any_work(
    tiny_checkpoint: Path, tiny_bundle: Path
) -> None:
    steps: list[str] = []

    class Steps(NoProgress):
        def step(self, name: str) -> None:
            steps.append(name)

    with pytest.raises(UsageError, match="--overwrite"):
        run(tiny_checkpoint, tiny_bundle, Steps())
    assert steps == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights(
    tiny_checkpoint: Path, tiny_bundle: Path, tmp_path: Path, traced: None, dtype: str
) -> None:
    report: ExportReport = run(tiny_checkpoint, tmp_path / "out", dtype=dtype, verify=True)
    assert report.parity is not None
    assert report.parity["passed"] is True
    assert report.parity["reference"].endswith(f"weights rounded to {dtype}, tiny-llama")
    assert report.manifest.dtype == dtype
    assert report.manifest.kv.dtype == "float32"
    wide, half = (external(graph(b, "decode")) for b in (tiny_bundle, tmp_path / "out"))
    assert half.keys() == wide.keys()
    assert all(half[name][2] * 2 == wide[name][2] for name in wide if name not in TABLES)
    assert all(half[name][2] == wide[name][2] for name in TABLES)
    file = (tmp_path / "out" / "weights.bin").stat().st_size
    assert file <= (tiny_bundle / "weights.bin").stat().st_size / 2 + ALIGNMENT * len(wide)


# Endings that are no success


class Strikes(NoProgress):
    """Raises in the middle of a step."""

    def __init__(self, where: str, error: BaseException) -> None:
        self._where, self._error, self._name = where, error, ""
        self.struck = False

    def step(self, name: str) -> None:
        self._name = name
        if name == self._where and name != "write the weights":
            self._strike()

    def advance(self, done: int, total: int, unit: str) -> None:
        if self._name == self._where and done > total // 2:
            self._strike()

    def _strike(self) -> None:
        self.struck = True
        raise self._error


STEPS = ["write the tokenizer", "write the weights", "write the graphs", "put the bundle in place"]
ENDS = [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]


@pytest.mark.parametrize("where", STEPS)
@pytest.mark.parametrize("error", ENDS, ids=lambda e: type(e).__name__)
def test_an_export_that_is_cut_short_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, traced: None, where: str, error: BaseException
) -> None:
    progress = Strikes(where, error)
    with pytest.raises(type(error)):
        run(tiny_checkpoint, tmp_path / "out", progress)
    assert progress.struck
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", ENDS, ids=lambda e: type(e).__name__)
def test_an_export_that_is_cut_short_keeps_the_old_bundle(
    tiny_checkpoint: Path, tiny_bundle: Path, copied: Copied, traced: None, error: BaseException
) -> None:
    old = copied(tiny_bundle)
    with pytest.raises(type(error)):
        run(tiny_checkpoint, old, Strikes("write the weights", error), overwrite=True)
    assert [p.name for p in old.parent.iterdir()] == [old.name]
    assert {p.name: p.read_bytes() for p in files_of(old)} == {
        p.name: p.read_bytes() for p in files_of(tiny_bundle)
    }


def test_overwrite_replaces(
    tiny_checkpoint: Path, tiny_bundle: Path, copied: Copied, traced: None
) -> None:
    old = copied(tiny_bundle)
    run(tiny_checkpoint, old, overwrite=True, max_num_seqs=3)
    assert open_bundle(old).manifest.limits.max_num_seqs == 3
    assert not (old / "parity.json").exists()


def test_a_disk_without_room(
    tiny_checkpoint: Path, tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    with pytest.raises(
        TrtllmLiteError, match=r"the bundle needs 0\.1 GB and the disk has 0\.0 GB free"
    ):
        run(tiny_checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_that_fails_its_gates_is_not_left(
    tiny_checkpoint: Path, tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = (Gate("logits_max_abs", False, 1.0, 0.1),)
    failing = Certificate(gates, (), 1.0, "transformers", 2, 2, failure="layer 0 departs")
    monkeypatch.setattr("trtllm_lite.exporter.verify.certify", lambda *_args: failing)
    with pytest.raises(VerificationError, match="not equal to its reference: layer 0 departs"):
        run(tiny_checkpoint, tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_dimensions_have_the_table_s_names_inside_the_graph_too(
    tiny_bundle: Path, phase: str
) -> None:
    model = onnx.load(tiny_bundle / f"{phase}.onnx", load_external_data=False)
    inside = [d for v in model.graph.value_info for d in v.type.tensor_type.shape.dim]
    names = {d.dim_param for d in inside if d.dim_param}
    assert names
    assert names <= {"batch", "seq", "num_logits", "capacity"}
