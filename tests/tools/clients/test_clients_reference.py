"""Scores in process: sums of token scores, and accuracies of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.llm import LLM
from trtllm_lite.tools.clients.reference import ITEMS, SCORE, score


def test_scores_are_the_sums_of_what_prompts_alone_score(tiny_bundle: Path) -> None:
    items: list[dict[str, Any]] = [
        {"question": "the river", "choices": [" ran", " mill"], "answer": 0},
        {"question": "count\n", "choices": ["the swallows", "its"], "answer": 1},
    ]
    with LLM(tiny_bundle) as llm:
        found = score(llm, items)
        for item, values in zip(items, found["scores"], strict=True):
            question = item["question"]
            for choice, value in zip(item["choices"], values, strict=True):
                text = question + choice
                (output,) = llm.generate(text, SCORE)
                scored = [next(iter(e.values())) for e in output.prompt_logprobs or [] if e]
                start = len(llm.tokenizer.encode(question.rstrip()))
                expected = sum(entry.logprob for entry in scored[start - 1 :])
                assert value == pytest.approx(expected, abs=1e-5)
    right = [v[0] >= v[1] for v in found["scores"]]
    assert found["acc"] == (right[0] + (not right[1])) / 2
    lengths = [[len(c) for c in (" ran", " mill")], [len("the swallows"), len("its")]]
    norm = [v[0] / n[0] >= v[1] / n[1] for v, n in zip(found["scores"], lengths, strict=True)]
    assert found["acc_norm"] == (norm[0] + (not norm[1])) / 2


def test_the_task_is_well_formed() -> None:
    for item in json.loads(ITEMS.read_text(encoding="utf-8")):
        assert 0 <= item["answer"] < len(item["choices"])
        assert len(set(item["choices"])) == len(item["choices"])
