"""The real model: SmolLM2-135M-Instruct from its package, exported, certified, and served."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from trtllm_lite import LLM, SamplingParams
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.tools.demo import find_model

pytestmark = pytest.mark.real

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "中国的首都是哪里?",
    "Write a haiku about the sea. 🙂",
)
COPIED = (
    "The river rises in the eastern hills and flows west for two hundred miles.",
    "In spring the snow melts and the water covers the low fields on both banks.",
    "Farmers move their animals to higher ground and wait until the water has gone.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    output = tmp_path_factory.mktemp("real") / "smollm2"
    return export(ExportOptions(model=str(find_model()), output=output), NoProgress())


@pytest.fixture(scope="module")
def bundle(report: ExportReport) -> Path:
    assert report.output is not None
    return report.output


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, max_num_seqs=4) as opened:
        yield opened


def conversation(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def test_certificate(report: ExportReport) -> None:
    """Greedy tokens are the eager model's on twenty varied prompts, and logits are close."""
    assert report.parity is not None
    prompts = report.parity["prompts"]
    assert len(prompts) >= 20
    assert all(p["new_tokens"] == 64 and p["first_divergence"] is None for p in prompts)
    assert max(p["max_abs"] for p in prompts) < 2e-3
    by_name = {p["name"]: p for p in prompts}
    assert by_name["long"]["prompt_tokens"] == 1500
    assert "empty system" in by_name
    assert report.parity["layers_verified"] == report.manifest.model.num_layers == 30


def test_every_tensor_stands_once(report: ExportReport) -> None:
    assert report.weight_bytes < report.manifest.model.num_parameters * 4 * 1.01


def test_batched_equals_alone(llm: LLM) -> None:
    together = llm.chat([conversation(q) for q in QUESTIONS], GREEDY)
    for question, result in zip(QUESTIONS, together, strict=True):
        alone = llm.chat(conversation(question), GREEDY)[0]
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids
        assert alone.outputs[0].text == result.outputs[0].text


def test_stream_equals_whole(llm: LLM) -> None:
    for question in QUESTIONS:
        pieces = list(llm.stream(messages=conversation(question), params=GREEDY))
        whole = llm.chat(conversation(question), GREEDY)[0].outputs[0]
        assert "".join(p.outputs[0].delta for p in pieces) == whole.text
        assert pieces[-1].finished
        assert pieces[-1].metrics.ttft is not None


@given(st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("a 你🙂🏽é"))))
@settings(max_examples=200, deadline=None)
def test_bytes_of_tokens_are_those_of_the_text(llm: LLM, text: str) -> None:
    """A few bytes that no character of any text has had are no tokens of this model."""
    ids = llm.tokenizer.encode(text)
    joined = b"".join(map(llm.tokenizer.token_bytes, ids))
    decoded = llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert joined.decode(errors="replace") == decoded
    assert (joined == text.encode()) == (decoded == text)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_the_steps_and_not_the_tokens(llm: LLM, temperature: float) -> None:
    """Speculation through the real graph, whose decode runs then have many shapes."""
    assert llm.config.speculation == "ngram"
    copy = conversation(f"Repeat this text word for word: {' '.join(COPIED)}")
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=64)
    drafted = llm.chat(copy, params)[0]
    plain = llm.chat(copy, replace(params, speculation=False))[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert plain.metrics.num_draft_tokens == 0
    assert drafted.metrics.num_accepted_tokens >= 10


def test_prefix_is_reused_and_changes_nothing(llm: LLM) -> None:
    long = conversation("Count the swallows. " * 20)
    first = llm.chat(long, GREEDY)[0]
    second = llm.chat(long, GREEDY)[0]
    assert second.cached_tokens >= 64
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_logprobs_are_the_eager_models(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    result = llm.generate("The river ran slowly past the old mill", params)[0]
    path = find_model()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1).numpy()
    assert result.prompt_logprobs is not None
    assert result.outputs[0].logprobs is not None
    entries = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
    for position, (token, entry) in enumerate(zip(ids[1:], entries, strict=True)):
        assert entry is not None
        assert np.isclose(entry[token].logprob, expected[position, token], atol=2e-3)


def test_seeded_sampling_ignores_its_neighbours(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=16)
    alone = llm.chat(conversation(QUESTIONS[0]), params)[0]
    mixed = llm.chat([conversation(q) for q in QUESTIONS], params)[0]
    assert alone.outputs[0].token_ids == mixed.outputs[0].token_ids


def test_command_line(bundle: Path) -> None:
    """generate, inspect and bench as a user types them."""
    text = run(
        "generate",
        str(bundle),
        "--chat",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "What is the capital of France?",
    )
    assert "Paris" in text
    facts = json.loads(run("inspect", str(bundle), "--json"))
    assert facts["manifest"]["model"]["num_layers"] == 30
    figures = json.loads(
        run(
            "bench",
            str(bundle),
            "--input-len",
            "16",
            "--output-len",
            "4",
            "--concurrency",
            "1,2",
            "--repeats",
            "1",
            "--json",
        )
    )
    assert len(figures["results"]) == 2


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "trtllm_lite", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
