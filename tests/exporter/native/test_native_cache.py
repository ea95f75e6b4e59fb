"""Native graphs over float16 and int8 caches: what is written, computed and refused."""

import json
import logging
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from trtllm_lite.exporter.native.cache import OPERATORS, TYPES
from trtllm_lite.exporter.replay import decode, prefill
from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.loading import LoadOptions, load
from trtllm_lite.runtime.native_table import GRAPHS, TABLE_NAME, graph_name
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampling_params import SamplingParams

Array = npt.NDArray[Any]
Open = Callable[..., Any]
# The third family's attention stays with ONNX Runtime.
pytestmark = pytest.mark.parametrize("family", ["llama", "gemma2"], indirect=True)
BYTES = {"float32": 4, "float16": 2, "int8": 1}
TOKENS = 100
"""Every family here knows as many."""


def rounded_cache(cached: Any) -> Any:
    """transformers' cache, made to keep what a cache of another type would."""
    cache, round_to = DynamicCache(), rounding(cached)
    update = cache.update

    def rounded(keys: Any, values: Any, layer: int, *args: Any, **more: Any) -> Any:
        kept = [round_to(x.numpy(), layer, i) for i, x in enumerate((keys, values))]
        return update(*map(torch.from_numpy, kept), layer, *args, **more)

    cache.update = rounded
    return cache


def rounding(cached: Any) -> Callable[[Array, int, int], Array]:
    """K (part 0) or V (part 1) of a layer, [1, kv_heads, tokens, head_dim], as the cache has it."""

    def round_to(x: Array, layer: int, part: int) -> Array:
        if cached.kind == "float16":
            return x.astype(np.float16).astype(np.float32)
        all_steps = (cached.scales.keys, cached.scales.values)[part]
        steps = all_steps[layer].reshape(1, x.shape[1], 1, x.shape[3])
        made: Array = np.clip(np.rint(x / steps), -127, 127) * steps
        return made

    return round_to


def eager_logits(model: Any, tokens: list[int], cache: Any = None) -> Array:
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    more = {} if cache is None else {name: cache, "use_cache": True}
    with torch.no_grad():
        made: Array = model(torch.tensor([tokens]), **more).logits[0].numpy()
    return made


def logits_of(session: Any, tokens: list[int]) -> Array:
    """Of all positions at once, [len(tokens), vocab]."""
    count = len(tokens)
    batch = Batch(
        phase="decode",
        first_slot=0,
        token_ids=np.array([tokens], np.int64),
        past_lens=np.zeros(1, np.int32),
        query_lens=np.array([count], np.int32),
        context_lens=np.array([count], np.int32),
        logits_indices=np.arange(count)[None],
    )
    made: Array = session.run(batch)[0].copy()
    return made


def error(made: Array, wanted: Array) -> float:
    """Relative to what the logits vary by."""
    return float(np.linalg.norm(made - wanted) / np.linalg.norm(wanted - wanted.mean()))


def tokens_of(seed: int, *counts: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, TOKENS, n).tolist() for n in counts]


def vocab_of(cached: Any) -> int:
    found: int = cached.family.report.manifest.model.vocab_size
    return found


# What is written


def test_a_graph_for_each_cache(cached: Any) -> None:
    table = json.loads((cached.bundle / TABLE_NAME).read_text())
    assert table["kv_dtypes"] == [cached.kind, "float32"]
    for kind in table["kv_dtypes"]:
        for rounding_name in GRAPHS:
            model = ir.load(cached.bundle / graph_name(rounding_name, kind))
            caches = [v for v in model.graph.inputs if str(v.name).startswith("past_k")]
            caches += [v for v in model.graph.outputs if str(v.name).startswith("present_v")]
            assert len(caches) == 2 * cached.family.layers
            assert {v.dtype for v in caches} == {TYPES[kind]}
            found = [n.op_type for n in model.graph if "Attention" in n.op_type]
            assert found == [OPERATORS[kind]] * cached.family.layers


def test_the_float32_graphs_are_those_of_a_plain_bundle(cached: Any) -> None:
    for name in GRAPHS.values():
        assert (cached.bundle / name).read_bytes() == (cached.family.bundle / name).read_bytes()
    manifests = [open_bundle(b).manifest for b in (cached.bundle, cached.family.bundle)]
    assert manifests[0].graphs == manifests[1].graphs
    assert manifests[0].kv == manifests[1].kv


def test_int8_graphs_have_their_steps(cached: Any) -> None:
    names = [graph_name(r, cached.kind) for r in GRAPHS if cached.kind == "int8"]
    for name in names:
        model = onnx.load(cached.bundle / name, load_external_data=False)
        inside = [t for t in model.graph.initializer if t.raw_data]
        data = {t.name: onnx.numpy_helper.to_array(t) for t in inside}
        nodes = [n for n in model.graph.node if n.op_type == "AttentionInt8"]
        for layer, node in enumerate(nodes):
            assert node.input[3] == f"past_key_{layer}"
            np.testing.assert_array_equal(data[node.input[12]], cached.scales.keys[layer])
            np.testing.assert_array_equal(data[node.input[13]], cached.scales.values[layer])


# What they compute


def test_logits_are_those_of_a_rounded_cache(cached: Any, open_kernels: Open) -> None:
    """Against transformers with the bundle's weights and a cache that rounds alike: what is left
    is the rounding of activations, and of cached values that it moves over an edge. Without the
    rounding of the cache, transformers is further off."""
    session = open_kernels(cached.bundle, "native", rounding="exact")
    assert session.info.kv_dtype == cached.kind
    model = cached.family.rounded_model()
    for tokens in tokens_of(3, 19, 24):
        made = logits_of(session, tokens)
        wanted = eager_logits(model, tokens, rounded_cache(cached))
        plain = eager_logits(model, tokens)
        moved = error(wanted, plain)
        assert moved > 1e-5
        assert error(made, wanted) < 1e-3 + moved / 3
        if cached.kind == "int8":
            assert error(made, wanted) < error(made, plain) / 2


def test_a_row_is_the_same_in_any_company(cached: Any, open_kernels: Open) -> None:
    session = open_kernels(cached.bundle, "native", intra_op_num_threads=2)
    rows = tokens_of(4, 19, 24, 2)
    together = prefill(session, rows)
    for chunk in (1, 5):
        np.testing.assert_array_equal(prefill(session, rows, chunk), together)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(prefill(session, [row])[0], together[i])
    whole = logits_of(session, rows[0])
    for i in range(len(rows[0])):
        np.testing.assert_array_equal(decode(session, rows[0][i : i + 1], [i])[0], whole[i])


def test_memory_is_that_of_the_cache(cached: Any, open_kernels: Open) -> None:
    plain = open_bundle(cached.bundle).manifest.kv
    elements = plain.bytes_per_token // 4
    for kind in (cached.kind, "float32"):
        session = open_kernels(cached.bundle, "native", kv_dtype=kind)
        assert session.info.kv_bytes_per_token == elements * BYTES[kind]
        (block,) = session.read(0, [(0, 5)])
        assert block.nbytes == 5 * session.info.kv_bytes_per_token
        assert {a.dtype for a in (*block.keys, *block.values)} == {np.dtype(kind)}
        session.close()


# In the engine: slots that are reused, prefixes that are kept, requests that give way


def alone(session: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens computed in slot 0 and in small pieces, with no engine."""
    logits = prefill(session, [prompt], 7)[0]
    made: list[int] = []
    for i in range(count):
        made.append(int(logits.argmax()))
        logits = decode(session, made[-1:], [len(prompt) + i])[0]
    return made


def together(
    session: Any, vocab_size: int, config: EngineConfig, calls: list[tuple[list[int], int]]
) -> Any:
    """The tokens of requests that an engine runs at the same time, and its figures at the end."""
    engine = Engine(session, config, vocab_size=vocab_size, eos_token_ids=())
    for i, (prompt, count) in enumerate(calls):
        params = SamplingParams(temperature=0.0, max_tokens=count)
        engine.add(Request(f"{i}", tuple(prompt), params))
    found: list[list[int]] = [[] for _ in calls]
    while engine.has_unfinished:
        for event in engine.step():
            assert event.token_id is not None, event
            found[int(event.request_id)].append(event.token_id)
    return found, engine.stats()


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    """Of few tokens a run, so that a row's results do not depend on them."""
    return EngineConfig(
        max_num_seqs=draw(st.integers(1, 4)),
        max_model_len=64,
        max_num_batched_tokens=draw(st.integers(4, 24)),
        max_kv_tokens=draw(st.integers(64, 140)),
        enable_prefix_caching=draw(st.booleans()),
        prefix_cache_bytes=draw(st.sampled_from([4000, 10**6])),
        block_size=draw(st.integers(1, 8)),
        speculation=draw(st.sampled_from(["off", "ngram"])),
        check_invariants=True,
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Beginnings that several requests share."""
    begin = tokens_of(draw(st.integers(0, 1)), 30)[0][: draw(st.integers(1, 30))]
    return begin + draw(st.lists(st.integers(3, 9), max_size=8))


def test_every_request_gets_what_it_would_get_alone(cached: Any, open_kernels: Open) -> None:
    session = open_kernels(cached.bundle, "native")
    calls = st.lists(st.tuples(prompts(), st.integers(1, 20)), min_size=1, max_size=6)

    @settings(max_examples=12)
    @given(configs(), calls)
    def check(config: EngineConfig, asked: list[tuple[list[int], int]]) -> None:
        found, stats = together(session, vocab_of(cached), config, asked)
        assert stats.slots_used == 0
        for got, (prompt, count) in zip(found, asked, strict=True):
            assert got == alone(session, prompt, count)

    check()


def test_requests_give_way_and_prefixes_are_kept(cached: Any, open_kernels: Open) -> None:
    """Preemption, kept blocks and reused slots do occur, and change nothing."""
    session = open_kernels(cached.bundle, "native")
    config = EngineConfig(
        max_num_seqs=3,
        max_model_len=64,
        max_num_batched_tokens=16,
        max_kv_tokens=100,
        block_size=4,
        check_invariants=True,
    )
    begin = tokens_of(1, 24)[0]
    calls = [([*begin, i], 30) for i in range(3, 8)]
    found, stats = together(session, vocab_of(cached), config, calls)
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert found == [alone(session, prompt, count) for prompt, count in calls]


# What is chosen, and what is refused


def test_the_bundle_s_own_cache_is_the_default(cached: Any, open_kernels: Open) -> None:
    for asked, got in (("auto", cached.kind), (cached.kind, cached.kind), ("float32", "float32")):
        session = open_kernels(cached.bundle, "native", kv_dtype=asked)
        assert session.info.kv_dtype == got
        session.close()
    other = "int8" if cached.kind == "float16" else "float16"
    said = f"kv_dtype: got '{other}'; the bundle has {cached.kind}, float32; export it with"
    with pytest.raises(UsageError, match=said):
        open_kernels(cached.bundle, "native", kv_dtype=other)
    with pytest.raises(UsageError, match="kv_dtype: got 'fp8'; allowed: auto, float32, float16, i"):
        open_kernels(cached.bundle, "auto", kv_dtype="fp8")


def test_other_operators_have_a_float32_cache(cached: Any, open_kernels: Open) -> None:
    session = open_kernels(cached.bundle, "onnxruntime")
    assert (session.info.kernels, session.info.kv_dtype) == ("onnxruntime", "float32")
    session.close()
    said = f"kv_dtype: got '{cached.kind}'; only the native kernels have such a cache, and they do "
    with pytest.raises(UsageError, match=said):
        open_kernels(cached.bundle, "onnxruntime", kv_dtype=cached.kind)


@pytest.mark.parametrize(("kernels", "said"), [("onnxruntime", True), ("auto", False)])
def test_loading_says_that_the_cache_is_another(
    cached: Any, open_kernels: Open, caplog: pytest.LogCaptureFixture, kernels: Any, said: bool
) -> None:
    open_kernels(cached.bundle, "native").close()  # skips where they cannot run
    options = LoadOptions(kernels=kernels, intra_op_num_threads=1, host_cache=kernels == "auto")
    with caplog.at_level(logging.WARNING, "trtllm_lite.runtime.loading"):
        load(cached.bundle, options).engine.close()
    wanted = f"the KV cache is float32: only the native kernels have it in {cached.kind}"
    assert (wanted in caplog.text) is said
