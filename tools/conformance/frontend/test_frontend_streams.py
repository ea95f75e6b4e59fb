"""Streams against whole answers; usage and log probabilities in both."""

from typing import Any

import pytest

from trtllm_lite.tools.conformance.frontend.client import (
    CHAT,
    COMPLETIONS,
    Frontend,
    text_of,
)

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 0}


@BOTH
@pytest.mark.parametrize(
    "fields", [{}, {"stop": "is"}, {"stop": ["is"]}, {"stop": ["is", ".", ","]}]
)
def test_a_stream_is_the_whole_answer(
    frontend: Frontend, path: str, fields: dict[str, Any]
) -> None:
    asked = {**GREEDY, "max_tokens": 48, **fields}
    whole = frontend.good(path, **asked)["choices"][0]
    chunks = frontend.chunks(path, **asked)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert [reason for reason in reasons if reason is not None] == [whole["finish_reason"]]
    assert reasons[-1] == whole["finish_reason"]
    text = whole["message"]["content"] if path == CHAT else whole["text"]
    assert text_of(chunks, path) == text
    assert all(chunk.get("usage") is None for chunk in chunks)


def test_a_stream_has_several_parts(frontend: Frontend) -> None:
    chunks = frontend.chunks(CHAT, **GREEDY, max_tokens=48)
    assert sum(bool(chunk["choices"][0]["delta"].get("content")) for chunk in chunks) > 1


def test_the_role_is_that_of_the_assistant(frontend: Frontend) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in frontend.chunks(CHAT, max_tokens=4)]
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]


@BOTH
def test_usage_comes_last_if_asked_for(frontend: Frontend, path: str) -> None:
    asked = {**GREEDY, "max_tokens": 16}
    whole = frontend.good(path, **asked)
    without = frontend.chunks(path, **asked, stream_options={"include_usage": False})
    chunks = frontend.chunks(path, **asked, stream_options={"include_usage": True})
    assert text_of(chunks, path) == text_of(without, path)
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][name] for name in counts] == [
        whole["usage"][name] for name in counts
    ]


@BOTH
def test_stream_options_are_for_streams(frontend: Frontend, path: str) -> None:
    response = frontend.post(path, stream=False, stream_options={"include_usage": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


def test_chat_logprobs(frontend: Frontend) -> None:
    answer = frontend.good(CHAT, logprobs=True, top_logprobs=2, max_tokens=10, temperature=0)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert tokens
    for token in tokens:
        assert token["token"]
        assert isinstance(token["logprob"], float)
        assert isinstance(token["bytes"], list)
        assert token["top_logprobs"]


def test_completion_logprobs(frontend: Frontend) -> None:
    answer = frontend.good(COMPLETIONS, logprobs=3, max_tokens=10, temperature=0)
    found = answer["choices"][0]["logprobs"]
    lists = [found[k] for k in ("tokens", "token_logprobs", "text_offset", "top_logprobs")]
    assert lists[0]
    assert len({len(each) for each in lists}) == 1


def test_streams_carry_logprobs(frontend: Frontend) -> None:
    chunks = frontend.chunks(CHAT, **GREEDY, logprobs=True, top_logprobs=2, max_tokens=10)
    carried = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert all(each["content"] for each in carried if each is not None)
    assert any(carried)
    chunks = frontend.chunks(COMPLETIONS, **GREEDY, logprobs=3, max_tokens=10)
    carried = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert all({"tokens", "token_logprobs"} <= each.keys() for each in carried if each)
    assert any(carried)


def test_top_logprobs_need_logprobs(frontend: Frontend) -> None:
    response = frontend.post(CHAT, top_logprobs=2, max_tokens=5)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_logprobs"
