"""From a bundle on disk to an `LLM`: limits, memory, and one real bundle end to end."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from trtllm_lite.runtime.backends.ort_session import OrtSession
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.config import EngineConfig, Speculation
from trtllm_lite.runtime.errors import BundleError, RequestError, UsageError
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.loading import (
    LoadOptions,
    engine_config,
    kv_room,
    kv_tokens_that_fit,
    load,
)
from trtllm_lite.runtime.manifest import (
    FileEntry,
    GraphSpec,
    KVLayer,
    KVSpec,
    Manifest,
    Phase,
    TensorSpec,
)
from trtllm_lite.runtime.manifest_io import read_manifest, write_manifest
from trtllm_lite.runtime.sampling_params import SamplingParams

VOCAB, DIM = 11, 4
CACHE = ("batch", 1, "capacity", DIM)


def test_limits_default_to_those_of_the_bundle(plain_manifest: Manifest) -> None:
    config = engine_config(plain_manifest, LoadOptions())
    assert (config.max_num_seqs, config.max_model_len) == (4, 64)
    assert config.max_kv_tokens == 4 * 64
    asked = LoadOptions(2, 8, 32, 40, enable_prefix_caching=False, prefix_cache_bytes=7)
    assert engine_config(plain_manifest, asked) == EngineConfig(2, 32, 8, 40, False, 7)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (LoadOptions(max_num_seqs=5), "max_num_seqs: got 5.*at most 4"),
        (LoadOptions(max_model_len=65), "max_model_len: got 65.*at most 64"),
        (LoadOptions(max_num_seqs=0), "max_num_seqs"),
        (LoadOptions(max_model_len=0), "max_model_len"),
        (LoadOptions(max_kv_tokens=0), "max_kv_tokens"),
        (LoadOptions(max_num_batched_tokens=0), "max_num_batched_tokens"),
        (LoadOptions(prefix_cache_bytes=-1), "prefix_cache_bytes"),
    ],
)
def test_limits_that_cannot_be_had_are_refused(
    plain_manifest: Manifest, options: LoadOptions, numbers: str
) -> None:
    with pytest.raises(UsageError, match=numbers):
        engine_config(plain_manifest, options)


def test_kv_tokens_are_all_slots_or_what_the_memory_holds() -> None:
    config = EngineConfig(4, 100, 16, 400)
    assert kv_tokens_that_fit(config, bytes_per_token=10, room=None) == 400
    assert kv_tokens_that_fit(config, bytes_per_token=10, room=4000) == 400
    assert kv_tokens_that_fit(config, bytes_per_token=10, room=3999) == 399
    assert kv_tokens_that_fit(config, bytes_per_token=10, room=1000) == 100
    with pytest.raises(UsageError, match=r"max_model_len 100 needs 1000 bytes.*999 bytes"):
        kv_tokens_that_fit(config, bytes_per_token=10, room=999)


def test_kv_takes_half_of_what_is_available_and_no_more_than_given() -> None:
    assert kv_room(None, None) is None
    assert (kv_room(None, 1001), kv_room(7, None)) == (500, 7)
    assert (kv_room(300, 1000), kv_room(900, 1000)) == (300, 500)


def test_the_memory_given_for_kv_is_kept(tiny_bundle: Path) -> None:
    with pytest.raises(UsageError, match="left for it is 5 bytes"):
        load(tiny_bundle, LoadOptions(host_cache=False, kv_bytes=5))


class Heard:
    """Keeps the steps, and the last amount of each."""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []

    def step(self, name: str) -> None:
        self.steps.append([name])

    def advance(self, done: int, total: int, unit: str) -> None:
        self.steps[-1][1:] = [done, total, unit]

    def note(self, text: str) -> None:
        pass


def test_reading_the_files_is_told_where_it_is_done(tiny_bundle: Path) -> None:
    size = sum(file.size for file in read_manifest(tiny_bundle).files)
    read = ["compare the files with their hashes", size, size, "bytes"]
    for check in (True, False):
        heard = Heard()
        options = LoadOptions(host_cache=False, check_hashes=check)
        load(tiny_bundle, options, heard).engine.close()
        assert heard.steps[:2] == ([read, ["open the graphs"]] if check else [])


def counting_graph(phase: Phase, *, chunks: bool) -> onnx.ModelProto:
    """A model without a past: after token t it predicts t + 1. The cache passes through."""
    picked = "GatherND <batch_dims = 1> (input_ids, picks)"
    more = "int32[batch] query_lens, int64[batch, num_logits] logits_indices,"
    seq, rows = ("seq", "num_logits") if chunks else (1, 1)
    cache = f"float[{', '.join(map(str, CACHE))}]"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 24]>
{phase} (int64[batch, {seq}] input_ids, int32[batch] past_lens, {more if chunks else ""}
    {cache} past_key_0, {cache} past_value_0)
    => (float[batch, {rows}, {VOCAB}] logits, {cache} present_key_0, {cache} present_value_0) {{
    {"picks = Unsqueeze (logits_indices, axis)" if chunks else ""}
    last = {picked if chunks else "Identity (input_ids)"}
    logits = Gather (table, last)
    present_key_0 = Identity (past_key_0)
    present_value_0 = Identity (past_value_0)
}}""")
    table = np.roll(np.eye(VOCAB, dtype=np.float32), 1, axis=1)
    arrays = {"table": table, "axis": np.array([2])}
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items()]
    model.graph.initializer.extend(tensors)
    return model


def counting_spec(phase: Phase, *, chunks: bool) -> GraphSpec:
    inputs = [
        TensorSpec("input_ids", "input_ids", "int64", ("batch", "seq" if chunks else 1)),
        TensorSpec("past_lens", "past_lens", "int32", ("batch",)),
    ]
    if chunks:
        indices = ("batch", "num_logits")
        inputs.append(TensorSpec("query_lens", "query_lens", "int32", ("batch",)))
        inputs.append(TensorSpec("logits_indices", "logits_indices", "int64", indices))
    inputs.append(TensorSpec("past_key_0", "past_key", "float32", CACHE, 0))
    inputs.append(TensorSpec("past_value_0", "past_value", "float32", CACHE, 0))
    outputs = (
        TensorSpec("logits", "logits", "float32", ("batch", "num_logits" if chunks else 1, VOCAB)),
        TensorSpec("present_key_0", "present_key", "float32", CACHE, 0),
        TensorSpec("present_value_0", "present_value", "float32", CACHE, 0),
    )
    return GraphSpec(phase, f"{phase}.onnx", tuple(inputs), outputs)


@pytest.fixture(params=[True, False], ids=["multi-token decode", "one-token decode"])
def counting_bundle(
    tmp_path: Path, plain_manifest: Manifest, request: pytest.FixtureRequest
) -> Path:
    """A bundle that takes token ids only; the model's end token is 9, the defaults add 7."""
    chunks: dict[Phase, bool] = {"prefill": True, "decode": request.param}
    for phase, many in chunks.items():
        onnx.save_model(counting_graph(phase, chunks=many), tmp_path / f"{phase}.onnx")
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "parity.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "max_new_tokens": 30}')
    names = ["prefill.onnx", "decode.onnx", "weights.bin", "parity.json", "generation_config.json"]
    contents = {name: (tmp_path / name).read_bytes() for name in names}
    files = [FileEntry(n, len(d), hashlib.sha256(d).hexdigest()) for n, d in contents.items()]
    manifest = replace(
        plain_manifest,
        model=replace(plain_manifest.model, vocab_size=VOCAB, num_layers=1, eos_token_ids=(9,)),
        kv=KVSpec("float32", (KVLayer(1, DIM),)),
        graphs=tuple(counting_spec(phase, chunks=many) for phase, many in chunks.items()),
        files=tuple(files),
        tokenizer=None,
        chat_template=None,
    )
    write_manifest(tmp_path, manifest)
    return tmp_path


def test_a_bundle_on_disk_generates(counting_bundle: Path) -> None:
    with LLM(counting_bundle, max_num_seqs=2, intra_op_num_threads=1) as llm:
        assert (llm.config.max_num_seqs, llm.config.max_model_len) == (2, 64)
        assert llm.config.max_kv_tokens == 128
        first, second, third = llm.generate(prompt_token_ids=[[1, 2], [8], [0, 0, 0]])
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (on,) = llm.generate(prompt_token_ids=[3], params=params)
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate("text")
    assert first.outputs[0].token_ids == (3, 4, 5, 6, 7)
    assert second.outputs[0].token_ids == (9,)
    assert third.outputs[0].finish_reason == "stop"
    assert on.outputs[0].token_ids == tuple((4 + i) % VOCAB for i in range(12))


def test_speculation_is_on_where_the_graph_can_check_drafts(counting_bundle: Path) -> None:
    multi = open_bundle(counting_bundle).manifest.graph("decode").is_multi_token
    with LLM(counting_bundle, max_num_seqs=2, intra_op_num_threads=1) as llm:
        assert llm.config.speculation == ("ngram" if multi else "off")
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        (out,) = llm.generate(prompt_token_ids=[3], params=params)
        assert out.outputs[0].token_ids == tuple((4 + i) % VOCAB for i in range(40))
        assert (out.metrics.num_accepted_tokens > 10) == multi
        assert llm.stats().accepted_tokens == out.metrics.num_accepted_tokens
    kinds: tuple[Speculation, ...] = ("off", "ngram")
    for wanted in kinds:
        options = LoadOptions(host_cache=False, speculation=wanted, max_draft_tokens=2)
        if wanted == "ngram" and not multi:
            with pytest.raises(UsageError, match="speculation: got 'ngram'"):
                load(counting_bundle, options)
            continue
        parts = load(counting_bundle, options)
        assert (parts.config.speculation, parts.config.max_draft_tokens) == (wanted, 2)
        parts.engine.close()


def test_every_option_reaches_what_it_is_for(counting_bundle: Path) -> None:
    options = LoadOptions(1, 8, 32, 20, 1, False, 7, False, True, "off", 5)
    (counting_bundle / "parity.json").write_text("[]")  # another hash, and the same size
    parts = load(counting_bundle, options)
    assert parts.config == EngineConfig(1, 32, 8, 20, False, 7, max_draft_tokens=5)
    assert parts.defaults == SamplingParams(temperature=0.0, max_tokens=30)
    assert parts.tokenizer is None
    session = parts.engine._session
    assert isinstance(session, OrtSession)
    used = session._graphs["decode"].session.get_session_options()
    assert used.get_session_config_entry("session.intra_op.spin_duration_us") == "2000"
    assert used.intra_op_num_threads == 1
    parts.engine.close()
    with pytest.raises(BundleError, match="sha256"):
        load(counting_bundle, replace(options, check_hashes=True))
