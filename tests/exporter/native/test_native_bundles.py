"""Quantized bundles run with the native kernels, and with ONNX Runtime's own."""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch

from trtllm_lite.exporter.replay import decode, prefill
from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.kernels import find_kernels
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.native_table import (
    DATA_NAME,
    FEW_TOKENS,
    GRAPHS,
    TABLE_NAME,
    from_json,
)
from trtllm_lite.runtime.native_weights import has_native
from trtllm_lite.runtime.sampling_params import SamplingParams

Array = npt.NDArray[Any]
Open = Callable[..., Any]


def prompts(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, vocab, n).tolist() for n in (19, 24, 2)]


def logits_of(session: Any, tokens: list[int], phase: str = "decode") -> Array:
    """Of all positions at once, [len(tokens), vocab]."""
    count = len(tokens)
    batch = Batch(
        phase="decode" if phase == "decode" else "prefill",
        first_slot=0,
        token_ids=np.array([tokens], np.int64),
        past_lens=np.zeros(1, np.int32),
        query_lens=np.array([count], np.int32),
        context_lens=np.array([count], np.int32),
        logits_indices=np.arange(count)[None],
    )
    made: Array = session.run(batch)[0].copy()
    return made


def eager_logits(model: Any, tokens: list[int]) -> Array:
    with torch.no_grad():
        made: Array = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return made


def error(made: Array, wanted: Array) -> float:
    """Relative to what the logits vary by."""
    return float(np.linalg.norm(made - wanted) / np.linalg.norm(wanted - wanted.mean()))


def test_files(family: Any) -> None:
    """The graph reads the data file and nothing else, each byte range that the table writes."""
    bundle = open_bundle(family.bundle)
    assert has_native(bundle)
    table = from_json(bundle.path(TABLE_NAME).read_bytes())
    model = onnx.load(bundle.path(GRAPHS["exact"]), load_external_data=False)
    placed = {}
    for tensor in model.graph.initializer:
        entries = {e.key: e.value for e in tensor.external_data}
        if entries:
            assert entries["location"] == DATA_NAME
            placed[int(entries["offset"])] = int(entries["length"])
    written = {c.target: c.length for c in table.copies}
    for weight in table.weights:
        written[weight.codes[1]] = int(np.prod(weight.packing.codes_shape))
        written[weight.scale[1]] = 2 * int(np.prod(weight.packing.scale_shape))
        if weight.zero is not None:
            written[weight.zero[1]] = int(np.prod(weight.packing.zero_shape))
    assert placed == written
    assert all(offset % 4096 == 0 for offset in placed)
    assert max(offset + length for offset, length in placed.items()) == table.size


def test_native_logits_are_those_of_the_rounded_weights(family: Any, open_kernels: Open) -> None:
    """Against transformers on the very weights that the bundle has: activations are rounded so
    finely that it hardly shows. ONNX Runtime rounds them to 8 bits, and is further off."""
    native = open_kernels(family.bundle, "native", rounding="exact")
    plain = open_kernels(family.bundle, "onnxruntime")
    assert (native.info.kernels, plain.info.kernels) == ("native", "onnxruntime")
    model = family.rounded_model()
    for tokens in prompts(family.report.manifest.model.vocab_size):
        wanted = eager_logits(model, tokens)
        ours, theirs = logits_of(native, tokens), logits_of(plain, tokens)
        assert error(ours, wanted) < 1e-3
        assert error(ours, wanted) < error(theirs, wanted) < 0.1


def test_long_chunks_round_once(family: Any, open_kernels: Open) -> None:
    """More than 24 tokens at a time: 8-bit activations, as ONNX Runtime has them."""
    native = open_kernels(family.bundle, "native")
    vocab = family.report.manifest.model.vocab_size
    tokens = np.random.default_rng(4).integers(3, vocab, 70).tolist()
    wanted = eager_logits(family.rounded_model(), tokens)
    assert 1e-3 < error(logits_of(native, tokens), wanted) < 0.1


def test_a_row_is_the_same_in_any_company(family: Any, open_kernels: Open) -> None:
    """In chunks or at once, beside other rows or alone, token by token or together: bit for bit.
    Where ONNX Runtime computes the attention, up to the last bits."""
    session = open_kernels(family.bundle, "native", intra_op_num_threads=2)
    rows = prompts(family.report.manifest.model.vocab_size)
    tolerance = 0.0 if family.name != "qwen2" else 1e-4

    def same(made: Array, wanted: Array) -> None:
        np.testing.assert_allclose(made, wanted, rtol=0, atol=tolerance)

    long = np.random.default_rng(5).integers(3, 90, 61).tolist()
    together = prefill(session, [*rows, long])
    for chunk in (1, 5, FEW_TOKENS, 40):
        same(prefill(session, [*rows, long], chunk), together)
    for i, row in enumerate((*rows, long)):
        same(prefill(session, [row])[0], together[i])
    whole = logits_of(session, rows[0])
    for i in range(len(rows[0])):
        same(decode(session, rows[0][i : i + 1], [i])[0], whole[i])


def test_the_prefix_cache_changes_no_token(family: Any) -> None:
    """Prompts of all lengths that begin alike, cold and with what the ones before them left."""
    if find_kernels().library is None:
        pytest.skip(f"no native kernels: {find_kernels().reason}")
    start = np.random.default_rng(6).integers(3, 90, 40).tolist()
    prompts = [start + [5 + i] * i for i in range(1, 30, 7)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    made: dict[bool, list[Any]] = {}
    for cached in (False, True):
        with LLM(
            family.bundle,
            max_model_len=90,
            max_num_seqs=2,
            enable_prefix_caching=cached,
            max_num_batched_tokens=33 if cached else 256,
        ) as llm:
            outputs = [llm.generate(prompt_token_ids=p, params=params)[0] for p in prompts]
        made[cached] = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
        assert any(o.cached_tokens for o in outputs) is cached
    if family.name == "qwen2":  # its attention is ONNX Runtime's
        made = {cached: [tokens for tokens, _ in texts] for cached, texts in made.items()}
    assert made[True] == made[False]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_weights_are_mapped_once_and_as_long_as_the_session(
    family: Any, open_kernels: Open
) -> None:
    gc.collect()
    before = mappings()
    session = open_kernels(family.bundle, "native")
    gc.collect()
    tokens = prompts(family.report.manifest.model.vocab_size)[0]
    assert np.isfinite(logits_of(session, tokens)).all()
    assert mappings() == before + 1
    session.close()
    del session
    gc.collect()
    assert mappings() == before


def mappings() -> int:
    """Of prepared weights, in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(line.endswith(f"/{DATA_NAME}") for line in lines)


def test_four_bits(llama_bundle: Callable[[str], Path], open_kernels: Open) -> None:
    """Both read the same codes, scales and zero points."""
    bundle = llama_bundle("int4")
    native, plain = (open_kernels(bundle, kernels) for kernels in ("native", "onnxruntime"))
    table = from_json((bundle / TABLE_NAME).read_bytes())
    assert {w.packing.bits for w in table.weights} == {4, 8}
    for tokens in prompts(300):
        ours, theirs = logits_of(native, tokens), logits_of(plain, tokens)
        assert error(ours, theirs) < 0.05


def test_the_fast_graph_rounds_once_everywhere(family: Any) -> None:
    limits = {}
    for rounding, name in GRAPHS.items():
        model = onnx.load(family.bundle / name, load_external_data=False)
        limits[rounding] = [
            attribute.i
            for node in model.graph.node
            if node.op_type == "BlockLinear"
            for attribute in node.attribute
            if attribute.name == "exact_tokens"
        ]
    assert set(limits["exact"]) == {24}
    assert limits["fast"] == [0] * len(limits["exact"])


def test_the_fast_graph_alone_lets_attention_use_bfloat16(family: Any) -> None:
    for rounding, name in GRAPHS.items():
        model = onnx.load(family.bundle / name, load_external_data=False)
        nodes = [n for n in model.graph.node if n.op_type == "Attention"]
        allowed = {a.i for n in nodes for a in n.attribute if a.name == "bfloat16"}
        assert bool(nodes) is (family.name != "qwen2")
        assert allowed == ({int(rounding == "fast")} if nodes else set())


def test_plain_bundles_have_none(llama_bundle: Callable[[str], Path]) -> None:
    bundle = open_bundle(llama_bundle("none"))
    assert not has_native(bundle)
    assert not {*GRAPHS.values(), TABLE_NAME} & {p.name for p in bundle.folder.iterdir()}


def test_the_table_is_json_for_people(family: Any) -> None:
    document = json.loads((family.bundle / TABLE_NAME).read_text())
    assert document["format"] == "trtllm-lite-native"
    assert len(document["weights"]) == len(from_json(json.dumps(document).encode()).weights)
