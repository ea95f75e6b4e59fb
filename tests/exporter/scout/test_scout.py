"""A model whose values go beyond float16: infinite without islands of float32, right with them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_lite.exporter.families import BASE
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.exporter.rounded.graph import HALF, in_float32
from trtllm_lite.exporter.scout.islands import (
    LIMIT,
    PhaseGraph,
    find_islands,
    magnitudes,
    overflows,
    rounded_logits,
)
from trtllm_lite.exporter.scout.runs import GraphRun
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import KVSpec
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.runtime.progress import NoProgress

VOCAB = 320
PROMPTS = [np.random.default_rng(seed).integers(0, VOCAB, 20).tolist() for seed in range(2)]
MODULE = "trtllm_lite.exporter.pipeline.build_graphs"


def save_wide(folder: Path) -> Any:
    """A tiny Gemma 3 whose first MLP gives values of some 100,000, which its norm behind lets
    through, as the large ones do. All weights fit float16."""
    values = {**BASE, "vocab_size": VOCAB, "head_dim": 16, "sliding_window": 8}
    config = AutoConfig.for_model("gemma3_text", **values)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        first = model.model.layers[0]
        first.mlp.up_proj.weight.mul_(300)
        first.mlp.down_proj.weight.mul_(3_000)
        first.post_feedforward_layernorm.weight.add_(40_000)
    model.save_pretrained(folder)
    return model


@dataclasses.dataclass(frozen=True)
class Made:
    """Two exports of one model, without and with the scout, and the model itself."""

    model: Any
    plain: Path
    scouted: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("scout")
    model = save_wide(folder / "model")
    traced: list[Graphs] = []

    def once(*args: Any) -> Graphs:
        if not traced:
            traced.append(build_graphs(*args))
        models = tuple(graph.clone() for graph in traced[0].models)
        return dataclasses.replace(traced[0], models=models)

    paths = [folder / "plain", folder / "scouted"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, once)
        for path in paths:
            options = ExportOptions(
                model=str(folder / "model"),
                output=path,
                target="tensorrt",
                max_model_len=64,
                verify=False,
                scout=path.name == "scouted",
            )
            export(options, NoProgress())
    return Made(model, *paths)


def graphs_of(bundle: Path) -> tuple[list[PhaseGraph], KVSpec]:
    manifest = read_manifest(bundle)
    return [PhaseGraph(g, ir.load(bundle / g.file)) for g in manifest.graphs], manifest.kv


def reference_logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:
    with torch.no_grad():
        return [model(torch.tensor([p])).logits[0, -1].numpy() for p in prompts]


def test_float16_alone_overflows_in_every_graph(made: Made) -> None:
    graphs, kv = graphs_of(made.plain)
    assert read_manifest(made.plain).float32_values == ()
    assert overflows(graphs, kv, made.plain, PROMPTS) == ("prefill", "decode", "extend")


def test_islands_of_float32_give_the_model_s_logits(made: Made) -> None:
    graphs, kv = graphs_of(made.scouted)
    assert overflows(graphs, kv, made.scouted, PROMPTS) == ()
    expected = reference_logits(made.model, PROMPTS)
    scale = max(np.abs(logits).max() for logits in expected)
    for graph in graphs:
        found = rounded_logits(graph, kv, made.scouted, PROMPTS)
        for ours, theirs in zip(found, expected, strict=True):
            assert np.abs(ours[-1] - theirs).max() < 0.01 * scale
            assert ours[-1].argmax() == theirs.argmax()


def test_the_manifest_lists_what_stays_float32(made: Made) -> None:
    names = read_manifest(made.scouted).float32_values
    assert len(names) >= 4
    graphs, _ = graphs_of(made.scouted)
    values = {v.name: v for node in graphs[0].model.graph for v in node.outputs}
    assert all(values[name].dtype != HALF for name in names if name in values)
    assert {
        v.dtype for v in graphs[0].model.graph.inputs if str(v.name).startswith("past_key")
    } == {HALF}


def test_magnitudes_are_those_of_the_float32_model(made: Made) -> None:
    graphs, kv = graphs_of(made.plain)
    found = magnitudes(graphs[0], kv, made.plain, PROMPTS, NoProgress())
    seen: list[float] = []
    hook = made.model.model.layers[0].register_forward_hook(
        lambda _module, _args, out: seen.append(
            float((out[0] if isinstance(out, tuple) else out).abs().max())
        )
    )
    reference_logits(made.model, PROMPTS)
    hook.remove()
    assert max(seen) > 65_504
    assert min(abs(value - max(seen)) for value in found.values()) < 0.01 * max(seen)


def test_all_graphs_have_one_idea_of_the_logits(made: Made) -> None:
    graphs, kv = graphs_of(made.plain)
    expected = reference_logits(made.model, PROMPTS)
    for graph in graphs:
        run = GraphRun(in_float32(graph.model), graph.spec, kv, made.plain)
        for prompt, theirs in zip(PROMPTS, expected, strict=True):
            *_, last = run.prompt(prompt)
            assert np.abs(last["logits"][0, -1] - theirs).max() < 0.01
    assert not list(made.plain.glob("scout-*"))


def test_logits_are_computed_at_both_ends_of_a_prompt(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens have the largest values, and may be a prompt's only ones."""
    monkeypatch.setattr("trtllm_lite.exporter.scout.runs.EDGE", 3)
    graphs, kv = graphs_of(made.plain)
    run = GraphRun(in_float32(graphs[0].model), graphs[0].spec, kv, made.plain)
    (found,) = run.prompt(PROMPTS[0])
    with torch.no_grad():
        expected = made.model(torch.tensor([PROMPTS[0]])).logits[0].numpy()
    both = np.concatenate([expected[:3], expected[-3:]])
    assert found["logits"][0].shape == both.shape
    assert np.abs(found["logits"][0] - both).max() < 0.01


def test_a_cache_beyond_float16_is_refused(made: Made) -> None:
    graphs, kv = graphs_of(made.plain)
    with pytest.raises(UnsupportedError, match=r"present_\w+ in the KV cache reaches .*bfloat16"):
        find_islands(graphs, kv, made.plain, PROMPTS, NoProgress(), limit=0.01)


def test_values_beyond_any_help_are_refused(made: Made) -> None:
    graphs, kv = graphs_of(made.plain)
    with pytest.raises(UnsupportedError, match=r"reaches .*--dtype bfloat16"):
        find_islands(graphs, kv, made.plain, PROMPTS, NoProgress(), limit=100.0)


def test_the_margin_is_half_of_the_range() -> None:
    assert pytest.approx(65_504 / 2) == LIMIT


def test_logits_that_stay_infinite_end_the_export(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtllm_lite.exporter.scout import apply

    graphs, kv = graphs_of(made.plain)
    specs, models = [g.spec for g in graphs], [g.model for g in graphs]
    monkeypatch.setattr(apply, "keep_float32", lambda model, names: 0)
    with pytest.raises(UnsupportedError, match="logits of prefill, decode, extend are not finite"):
        apply.put_islands(specs, models, kv, made.plain, PROMPTS, NoProgress())


def test_prompts_are_windows_of_the_text_within_the_model_s_length() -> None:
    from trtllm_lite.exporter.scout.apply import scout_prompts

    def encode(text: str) -> list[int]:
        return [1, *text.encode()[:2_000]]

    prompts = scout_prompts(encode, 256, 32)
    assert [len(prompt) for prompt in prompts] == [32] * 4
    assert all(prompt[0] == 1 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert all(token < 50 for prompt in scout_prompts(None, 50, 16) for token in prompt)
