"""Every family that is called proved: a tiny random checkpoint, exported, certified, and served.

The certificate's numbers are checked here, and so is, without the certificate's code, that the
engine's greedy tokens equal the eager model's.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_lite import LLM, SamplingParams
from trtllm_lite.exporter.cuda_placement.by_list import misplaced_nodes
from trtllm_lite.exporter.cuda_placement.kernel_list import load_kernel_list
from trtllm_lite.exporter.families import PROVED, REFUSED, Family, families, tiny_config
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.native.lower import lower_native
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.passes import compute_in
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.exporter.quantize.plan import plan_formats
from trtllm_lite.exporter.quantize.rewrite import find_linears
from trtllm_lite.exporter.replay import greedy, prefill
from trtllm_lite.exporter.trace import trace
from trtllm_lite.exporter.verify import CHUNKS
from trtllm_lite.runtime.backends import open_for_proof, open_session
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import GraphSpec, Manifest
from trtllm_lite.runtime.progress import NoProgress

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT_LENGTHS = (1, 9, 29, 40)
NEW_TOKENS = 40
SaveRandom = Callable[[Any, Path], Path]
ForCuda = Callable[[ir.Model, GraphSpec], dict[str, int]]
AsCuda = Callable[[Bundle, Path], Bundle]
HalfErrors = Callable[[Path, ExportReport], tuple[float, float]]

Names = tuple[str, ...]

GATED: Names = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3")
GATED += ("granite", "cohere", "cohere2", "glm4", "stablelm")
# Queries, keys and values apart, and a gate: two packed products a layer.
TWO: Names = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "olmo3", "granite")
TWO += ("stablelm", "cohere", "cohere2")
# One: the feed-forward part is one product already, or has no gate.
ONE = ("glm4", "starcoder2", "opt")
# No norm between the projection and the attention.
READY: Names = ("llama", "mistral", "qwen2", "gemma2", "smollm3", "granite", "cohere2", "glm4")
READY += ("stablelm",)
# For each pass, how often it matches in each layer of a family.
FUSED: dict[str, dict[str, int]] = {
    "pack_projections": {
        **dict.fromkeys(TWO, 2),
        **dict.fromkeys(ONE, 1),
        "gemma2": 2,
        "gemma3_text": 2,
    },
    "pack_attention": dict.fromkeys((*READY, "starcoder2", "gpt2", "gpt_neox", "opt"), 1),
    "fuse_activation": dict.fromkeys((*GATED, "gpt2"), 1),
    "fuse_skip_norm": {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite"), 2),
        **dict.fromkeys(
            ("gemma2", "gemma3_text", "glm4", "starcoder2", "stablelm", "gpt2", "opt"), 2
        ),
        **dict.fromkeys(("cohere", "cohere2", "gpt_neox"), 1),
    },
    "widen_rows": {"gpt2": 4, "opt": 2},
    "turn_weights": {"gpt2": 4},
    "regroup_heads": {"gpt_neox": 1},
    "fold_scale": {"opt": 1},
    "fuse_rotary": {"phi3": 1},
    # Queries and keys have norms of their own in one of the two.
    "fuse_layer_norm": {"cohere": 3, "cohere2": 1},
}
# The norm after the last layer.
LAST_NORM = {"cohere": 1, "cohere2": 1}
FIRST_AND_LAST = {"gpt2": 1, "olmo2": 1, "olmo3": 1, "opt": 1}
# Weights of norms to which one is added, in each layer.
PLUS_ONE = {"gemma2": 4, "gemma3_text": 6}
# Matrices that nothing multiplies by: learned positions, norms of queries and keys.
KEPT_WHOLE = re.compile(r"(wpe|embed_positions|[qk]_norm)\.weight$")
WITHOUT_GATE = ("starcoder2", "gpt2", "gpt_neox", "opt")
# The kernel rotates by a multiple of eight angles.
ANGLES = 8


@dataclass(frozen=True)
class Exported:
    """What exporting a family made, what the tracer gave, and the float graphs that the bundle was
    made of."""

    family: Family
    checkpoint: Path
    report: ExportReport
    traced: ir.Model
    graphs: Graphs


@pytest.fixture(scope="module", params=PROVED, ids=lambda f: f.key)
def exported(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    random_checkpoint: SaveRandom,
) -> Exported:
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family.key)
    checkpoint = random_checkpoint(tiny_config(family), folder / "checkpoint")
    options = ExportOptions(model=str(checkpoint), output=folder / "bundle")
    traced: list[ir.Model] = []
    built: list[Graphs] = []

    def kept_trace(*args: Any) -> ir.Model:
        traced.append(trace(*args))
        return traced[-1].clone()

    def kept_graphs(*args: Any) -> Graphs:
        built.append(build_graphs(*args))
        return built[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtllm_lite.exporter.graphs.trace", kept_trace)
        patch.setattr("trtllm_lite.exporter.pipeline.build_graphs", kept_graphs)
        report = export(options, NoProgress())
    return Exported(family, checkpoint, report, traced[0], built[0])


@pytest.fixture(scope="module")
def proof(exported: Exported) -> tuple[Family, Path, ExportReport]:
    """The family, its checkpoint, and the report of exporting it."""
    return exported.family, exported.checkpoint, exported.report


def test_certificate(proof: tuple[Family, Path, ExportReport]) -> None:
    _, _, report = proof
    assert report.parity is not None
    parity = report.parity
    gates = {g["name"]: g for g in parity["gates"]}
    assert gates["greedy_tokens"]["value"] == 1.0
    for name, gate in gates.items():
        limit = 1.0 if name == "greedy_tokens" else 1e-4 * parity["logit_scale"]
        assert gate["passed"]
        assert gate["value"] <= limit
    assert parity["layers_verified"] == parity["num_layers"]
    assert min(p["new_tokens"] for p in parity["prompts"]) >= NEW_TOKENS
    assert len({p["prompt_tokens"] for p in parity["prompts"]}) > 4
    assert len(CHUNKS) >= 3


def test_certificate_goes_past_windows_and_switches(
    proof: tuple[Family, Path, ExportReport],
) -> None:
    family, _, report = proof
    assert report.parity is not None
    kv = report.manifest.kv
    windows = {x.sliding_window for x in kv.layers if x.sliding_window is not None}
    assert windows == (
        {family.tiny["sliding_window"]} if family.tiny.get("sliding_window") else set()
    )
    names = {p["name"] for p in report.parity["prompts"]}
    assert {f"past {w + 5}" for w in windows} <= names
    rope = family.tiny.get("rope_parameters", {})
    if "original_max_position_embeddings" in rope:
        assert f"past {rope['original_max_position_embeddings'] + 5}" in names
    assert report.parity["skipped"] == ()
    if rope.get("rope_type") == "longrope":
        switch = rope["original_max_position_embeddings"]
        assert kv.recompute_at == switch
        assert {f"past {switch - 3}", f"past {switch + 5}"} <= names


def test_engine_equals_eager(proof: tuple[Family, Path, ExportReport]) -> None:
    """Ragged prompts through continuous batching, in chunks of at most 16, 40 tokens each."""
    _, checkpoint, report = proof
    assert report.output is not None
    vocab = report.manifest.model.vocab_size
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(report.output, max_num_seqs=3, max_num_batched_tokens=16) as llm:
        results = llm.generate(prompt_token_ids=prompts, params=params)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    ).eval()
    regimes = report.manifest.kv.recompute_at is not None
    for prompt, result in zip(prompts, results, strict=True):
        tokens = list(result.outputs[0].token_ids)
        assert len(tokens) == NEW_TOKENS
        assert tokens == _eager(model, prompt, tokens, one_by_one=regimes)


def test_passes_match(proof: tuple[Family, Path, ExportReport]) -> None:
    """Each pass finds in each layer what the family's configuration says there is."""
    family, _, report = proof
    layers = report.manifest.model.num_layers
    counts = report.counts
    assert counts["fold_rotary"] == _rotating_layers(family)
    wanted = {name: layers * FUSED[name].get(family.model_type, 0) for name in FUSED}
    # The first layer's norm follows the embedding, the last norm follows the last layer.
    wanted["fuse_skip_norm"] += FIRST_AND_LAST.get(family.model_type, 0)
    wanted["fuse_layer_norm"] += LAST_NORM.get(family.model_type, 0)
    assert {name: counts[name] for name in FUSED} == wanted
    assert counts["pick_tokens"] == 1
    assert counts["hoist_tokens"] > 0
    plus_one = PLUS_ONE.get(family.model_type)
    assert counts["fold_offsets"] == (0 if plus_one is None else plus_one * layers + 1)


def test_weights_are_quantized(exported: Exported) -> None:
    """All that a graph multiplies by, and the embedding of the tokens."""
    graphs = exported.graphs
    found = find_linears(graphs.models)
    left = {name for name in graphs.parts if name not in {w.name for w in found}}
    matrices = {n for n in left if len(graphs.weights[n].shape or ()) > 1}
    assert {name for name in matrices if not KEPT_WHOLE.search(name)} == set()
    assert sum(w.is_embedding for w in found) == sum(w.is_head for w in found) == 1


def test_native_graph_has_our_operators(exported: Exported) -> None:
    """Every product, every attention and the embedding; a gate goes with its product."""
    graphs, layers = exported.graphs, len(exported.graphs.facts)
    found = find_linears(graphs.models)
    native = lower_native(graphs.models[-1], plan_formats("int8", found), found)
    assert native is not None
    model_type = exported.family.model_type
    assert native.counts == {
        "gather": 1,
        "linear": 1 + 4 * layers,
        "attention": layers,
    } | ({"gated": layers} if model_type not in WITHOUT_GATE else {})
    ops = {node.op_type for node in native.model.graph}
    assert not ops & {"FusedMatMul", "MatMul", "Gemm", "GroupQueryAttention"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_node_has_a_cuda_kernel(exported: Exported, for_cuda: ForCuda, dtype: str) -> None:
    """What the `cuda` target makes of the graph: it shares all passes up to these."""
    model, layers = exported.graphs.models[-1].clone(), len(exported.graphs.facts)
    compute_in(model, dtype)
    assert for_cuda(model, exported.graphs.specs[-1])["take_longest"] == layers
    assert misplaced_nodes(model, load_kernel_list()) == []


def test_the_cuda_graph_computes_the_same(
    exported: Exported, as_cuda: AsCuda, tmp_path: Path
) -> None:
    """In float32 on the CPU, through the session of that target: ragged prompts, in one pass and in
    chunks, and decode."""
    plain = Bundle(exported.report.output or tmp_path, exported.report.manifest)
    options = SessionOptions(num_slots=3, capacity=plain.manifest.limits.max_model_len)
    vocab, switch = plain.manifest.model.vocab_size, plain.manifest.kv.recompute_at
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, vocab, n).tolist() for n in (9, 1, 17)]
    seen = []
    other = open_for_proof(as_cuda(plain, tmp_path), options)
    for session in (open_session(plain, options), other):
        tokens, logits = greedy(session, prompts, 12, switch)
        seen.append((tokens, logits, prefill(session, prompts, 4)))
        session.close()
    (expected, wanted, _), (tokens, logits, chunked) = seen
    limit = 5e-5 * np.abs(wanted).max()
    assert tokens == expected
    assert np.abs(logits - wanted).max() <= limit
    assert np.abs(chunked - wanted[0]).max() <= limit


def test_the_tensorrt_graphs_compute_the_same(exported: Exported, tmp_path: Path) -> None:
    """From the same trace, in float32 through ONNX Runtime: ragged prompts in one pass, by prefill,
    and in chunks, by extend, and decode. One Attention node a layer where there is no softcap."""
    family, plain = exported.family, exported.report
    made = _export_again(exported, tmp_path, "tensorrt", "float32")
    kernels = 0 if "attn_logit_softcapping" in family.tiny else made.manifest.model.num_layers
    for phase in ("prefill", "decode", "extend"):
        assert made.counts[f"{phase}.standard_attention"] == made.manifest.model.num_layers
        model = ir.load(tmp_path / "bundle" / f"{phase}.onnx")
        assert [n.op_type for n in model.graph].count("Attention") == kernels
    (expected, wanted), (tokens, logits) = (_greedy(r) for r in (plain, made))
    assert tokens == expected
    assert np.abs(logits - wanted).max() <= 5e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(("target", "dtype"), [("tensorrt", "float16"), ("cuda", "bfloat16")])
def test_half_precision_is_as_exact_as_eager_s(
    exported: Exported, half_errors: HalfErrors, tmp_path: Path, target: str, dtype: str
) -> None:
    """With every value rounded, as on a GPU."""
    made = _export_again(exported, tmp_path, target, dtype)
    ours, eager = half_errors(exported.checkpoint, made)
    assert 0.1 * eager < ours < 1.5 * eager


def test_golden_contract(
    proof: tuple[Family, Path, ExportReport], pytestconfig: pytest.Config
) -> None:
    family, _, report = proof
    path = GOLDEN / f"{family.key}.contract.json"
    contract = _contract(report.manifest)
    if pytestconfig.getoption("--update-golden"):
        path.write_text(json.dumps(contract, indent=1) + "\n")
    assert contract == json.loads(path.read_text())


def test_goldens_are_of_families() -> None:
    assert {p.name for p in GOLDEN.glob("*.json")} == {f"{f.key}.contract.json" for f in PROVED}


@pytest.mark.parametrize("family", REFUSED, ids=lambda f: f.key)
def test_refused_families_say_why(family: Family, tmp_path: Path) -> None:
    folder = tmp_path / family.key
    config = AutoConfig.for_model(family.model_type)
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(UnsupportedError, match=family.note.split(":")[0]):
        export(ExportOptions(model=str(folder), output=tmp_path / "out"), NoProgress())
    assert not (tmp_path / "out").exists()


def test_names_are_unique() -> None:
    keys = [f.key for f in families()]
    assert len(keys) == len(set(keys))


def _export_again(exported: Exported, folder: Path, target: str, dtype: str) -> ExportReport:
    """From the same trace, for another target."""
    model, output = str(exported.checkpoint), folder / "bundle"
    options = ExportOptions(model, output, target, dtype, verify=False, scout=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtllm_lite.exporter.graphs.trace", lambda *_args: exported.traced.clone())
        return export(options, NoProgress())


def _greedy(report: ExportReport) -> tuple[list[list[int]], Any]:
    """Tokens of ragged prompts, and all logits; those of prompts in chunks of 5 at the end."""
    limits, model = report.manifest.limits, report.manifest.model
    bundle = Bundle(report.output or Path(), report.manifest)
    session = open_session(bundle, SessionOptions(num_slots=4, capacity=limits.max_model_len + 8))
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, model.vocab_size, n).tolist() for n in (9, 1, 29, 40)]
    tokens, logits = greedy(session, prompts, 24, report.manifest.kv.recompute_at)
    chunked = prefill(session, prompts, 5)
    session.close()
    return tokens, np.concatenate([logits, chunked[None]])


def _rotating_layers(family: Family) -> int:
    """Layers whose rotary embedding depends on the position alone and fits the kernel."""
    config = tiny_config(family)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" or family.model_type in ("gpt2", "opt"):
        return 0
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if int(head * rope.get("partial_rotary_factor", 1.0)) % (2 * ANGLES):
        return 0
    if family.model_type == "smollm3":
        return sum(config.no_rope_layers)
    if family.model_type == "cohere2":
        return list(config.layer_types).count("sliding_attention")
    return int(config.num_hidden_layers)


def _eager(model: Any, prompt: list[int], tokens: list[int], *, one_by_one: bool) -> list[int]:
    """The model's greedy choice after the prompt and after each of the tokens but the last. One
    pass shows all of them, unless the model computes every position anew as it gets longer."""
    ids = [*prompt, *tokens]
    ends = range(len(prompt), len(ids)) if one_by_one else [len(ids) - 1]
    keep = 1 if one_by_one else len(tokens)
    chosen: list[int] = []
    with torch.no_grad():
        for end in ends:
            logits = model(torch.tensor([ids[:end]]), use_cache=False).logits[0, -keep:]
            chosen += [int(t) for t in logits.argmax(dim=-1)]
    return chosen


def _contract(manifest: Manifest) -> dict[str, Any]:
    """Names, roles, dtypes and symbolic shapes: what a reader in another language relies on."""
    graphs = {
        graph.phase: {
            side: [[t.name, t.role, t.dtype, list(t.shape)] for t in table]
            for side, table in (("inputs", graph.inputs), ("outputs", graph.outputs))
        }
        for graph in manifest.graphs
    }
    return {"kv": json.loads(json.dumps(asdict(manifest.kv))), "graphs": graphs}
