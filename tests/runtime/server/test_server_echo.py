"""Prompts that are scored for evaluation harnesses: one entry for every token there is."""

from collections.abc import Callable
from typing import Any

import pytest

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_the_answer_is_scored_too(run_lab: RunLab, stream: bool) -> None:
    """lm-eval asks for one token and drops the last score: it must not be one of the prompt's."""

    async def test(lab: Lab) -> None:
        only_the_end = {"0": 100.0}
        fields = {"max_tokens": 1, "echo": True, "logprobs": 1, "logit_bias": only_the_end}
        alone = (await lab.complete("hello", max_tokens=0, echo=True, logprobs=1)).json()
        answer = await lab.complete("hello", **fields, stream=stream)
        bodies = answer.events()[:-1] if stream else [answer.json()]
        choices = [choice for body in bodies for choice in body["choices"]]
        assert choices[-1]["finish_reason"] == "stop"
        assert "".join(choice["text"] for choice in choices) == "hello"
        scores = [s for choice in choices for s in choice["logprobs"]["token_logprobs"]]
        assert len(scores) == 5 + 1
        assert scores[:-1] == alone["choices"][0]["logprobs"]["token_logprobs"]

    run_lab(test)
