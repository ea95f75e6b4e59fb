"""Every family that is called proved: a tiny random checkpoint, exported, certified, and served.

The certificate's numbers are checked here, and so is, without the certificate's code, that the
engine's greedy tokens equal the eager model's.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_lite import LLM, SamplingParams
from trtllm_lite.exporter.families import PROVED, REFUSED, Family, families, tiny_config
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.exporter.verify import CHUNKS
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import Manifest
from trtllm_lite.runtime.progress import NoProgress

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT_LENGTHS = (1, 9, 29, 40)
NEW_TOKENS = 40
SaveRandom = Callable[[Any, Path], Path]


@pytest.fixture(scope="module", params=PROVED, ids=lambda f: f.key)
def proof(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    random_checkpoint: SaveRandom,
) -> tuple[Family, Path, ExportReport]:
    """The family, its checkpoint, and the report of exporting it."""
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family.key)
    checkpoint = random_checkpoint(tiny_config(family), folder / "checkpoint")
    options = ExportOptions(model=str(checkpoint), output=folder / "bundle")
    return family, checkpoint, export(options, NoProgress())


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
