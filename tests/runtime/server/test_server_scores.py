"""Bytes of scored tokens: joined, they are the answer, characters that are cut through too."""

from collections.abc import Callable
from typing import Any

import pytest

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bytes_of_the_tokens_are_those_of_the_answer(run_lab: RunLab, seed: int) -> None:
    async def test(lab: Lab) -> None:
        parts = {str(i): 6.0 for i in set(lab.llm.tokenizer.encode("é😀"))}
        parts["0"] = -100.0  # the end token: one of the answer, not of its text
        fields = {
            **{"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": seed},
            **{"logit_bias": parts, "logprobs": True, "top_logprobs": 2},
        }
        (whole,) = (await lab.chat("hello", **fields)).json()["choices"]
        content = whole["logprobs"]["content"]
        joined = bytes(byte for entry in content for byte in entry["bytes"])
        assert joined.decode(errors="replace") == whole["message"]["content"]
        cut = [entry for entry in content if "\ufffd" in entry["token"]]
        assert cut
        assert all(entry["bytes"] and max(entry["bytes"]) > 127 for entry in cut)
        for entry in content:
            assert all(isinstance(top["bytes"], list) for top in entry["top_logprobs"])
        *events, _ = (await lab.chat("hello", **fields, stream=True)).events()
        scores = [c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
        streamed = [b for s in scores for entry in s["content"] for b in entry["bytes"]]
        assert bytes(streamed) == joined

    run_lab(test)
