"""POST /v1/chat/completions: the engine's own answer, in OpenAI's shape."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.sampling_params import SamplingParams

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]


async def generate(lab: Lab, text: str, **params: Any) -> Any:
    """What the engine makes of the rendered prompt, asked directly."""
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": None, **params}
    return await lab.llm.generate(text, SamplingParams(**given))


def joined(events: list[Any]) -> dict[int, str]:
    """Streamed text by choice."""
    texts: dict[int, str] = defaultdict(str)
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    return dict(texts)


def test_an_answer_is_the_engines(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        want = await generate(lab, "hello", max_tokens=9)
        answer = await lab.chat("hello", max_tokens=9)
        made = answer.json()
        (choice,) = made["choices"]
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert choice["message"] == {
            "role": "assistant",
            "content": want.outputs[0].text,
            "refusal": None,
        }
        assert choice["finish_reason"] == want.outputs[0].finish_reason
        assert made["id"].startswith("chatcmpl-")
        assert len(made["id"]) == len("chatcmpl-") + 32
        assert (made["object"], made["model"]) == ("chat.completion", "fake")
        assert made["system_fingerprint"] == "fp-1"
        count = len(want.outputs[0].token_ids)
        assert made["usage"]["prompt_tokens"] == 5
        assert made["usage"]["completion_tokens"] == count
        assert made["usage"]["total_tokens"] == 5 + count

    run_lab(test)


def test_an_alias_is_answered_under_its_name(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        assert (await lab.chat(model="alias/two", max_tokens=1)).json()["model"] == "alias/two"
        answer = await lab.chat(model="gpt-x", max_tokens=1)
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert answer.error["message"] == "The model `gpt-x` does not exist."

    run_lab(test)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 12},
        {"max_tokens": 12, "n": 3, "temperature": 1.0, "seed": 5},
        {"max_tokens": 20, "stop": ["a", "é"], "seed": 1, "temperature": 1.5},
        {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
        {},
    ],
)
def test_a_stream_adds_up_to_the_answer(run_lab: RunLab, fields: dict[str, Any]) -> None:
    async def test(lab: Lab) -> None:
        whole = (await lab.chat("a long question", **fields)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await lab.chat("a long question", **fields, **options)
        *events, done = answer.events()
        assert done == "[DONE]"
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        texts = {c["index"]: c["message"]["content"] for c in whole["choices"]}
        assert joined(events) == texts
        *parts, last = events
        assert {e["id"] for e in events} == {events[0]["id"]}
        assert {e["object"] for e in events} == {"chat.completion.chunk"}
        assert all(e["usage"] is None for e in parts)
        assert (last["choices"], last["usage"]["total_tokens"]) == (
            [],
            whole["usage"]["total_tokens"],
        )
        for index in texts:
            check_choice(index, parts, whole["choices"][index])

    run_lab(test)


def check_choice(index: int, events: list[Any], whole: Any) -> None:
    own = [c for e in events for c in e["choices"] if c["index"] == index]
    assert own[0]["delta"] == {"role": "assistant", "content": ""}
    assert own[-1]["delta"] == {}
    reasons = [c["finish_reason"] for c in own]
    assert reasons == [None] * (len(own) - 1) + [whole["finish_reason"]]
    if whole["logprobs"] is not None:
        content = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert content == whole["logprobs"]["content"]


def test_logprobs_are_those_of_the_text(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        bias = dict.fromkeys(lab.llm.tokenizer.encode("é😀"), -100.0)  # no parts of characters
        want = await generate(lab, "hello", max_tokens=8, logprobs=3, logit_bias=bias)
        fields = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3}
        shown = {str(token): value for token, value in bias.items()}
        answer = await lab.chat("hello", **fields, logit_bias=shown)
        (choice,) = answer.json()["choices"]
        content = choice["logprobs"]["content"]
        scored = want.outputs[0].logprobs[: len(content)]
        assert "".join(c["token"] for c in content) == choice["message"]["content"]
        for entry, raw in zip(content, scored, strict=True):
            taken = next(iter(raw.values()))
            assert (entry["token"], entry["logprob"]) == (taken.decoded_token, taken.logprob)
            top = [t["logprob"] for t in entry["top_logprobs"]]
            assert top == sorted((x.logprob for x in raw.values()), reverse=True)[:3]
            assert entry["bytes"] == list(entry["token"].encode())

    run_lab(test)


def test_continuous_usage_counts_up(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        fields = {"stream": True, "stream_options": options, "max_tokens": 6, "ignore_eos": True}
        *events, _ = (await lab.chat("hello", **fields)).events()
        counts = [e["usage"]["completion_tokens"] for e in events]
        assert counts == sorted(counts)
        assert counts[-1] == 6

    run_lab(test)


def test_a_prompt_over_the_context_is_refused_with_both_numbers(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.chat("x" * 70)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 64" in answer.error["message"]
        assert "70 prompt tokens" in answer.error["message"]
        assert answer.error["param"] == "messages"
        too_many = await lab.chat("x" * 60, max_tokens=5)
        assert (too_many.status, too_many.error["param"]) == (400, "max_tokens")
        full = await lab.chat("x" * 63, ignore_eos=True)
        assert full.json()["usage"]["completion_tokens"] == 1
        assert full.json()["choices"][0]["finish_reason"] == "length"

    run_lab(test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"logit_bias": {"500": 1}}, "logit_bias"),
        ({"stop_token_ids": [500]}, "stop_token_ids"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}],
                    }
                ]
            },
            "messages",
        ),
    ],
)
def test_a_refusal_names_the_field_and_the_server_goes_on(
    run_lab: RunLab, fields: dict[str, Any], param: str
) -> None:
    async def test(lab: Lab) -> None:
        before = (await lab.chat("hello", max_tokens=5)).json()["choices"]
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        for stream in (False, True):
            answer = await lab.post("/v1/chat/completions", {**body, "stream": stream})
            assert (answer.status, answer.error["param"]) == (400, param)
            assert answer.error["type"] == "invalid_request_error"
        assert (await lab.chat("hello", max_tokens=5)).json()["choices"] == before

    run_lab(test)


def test_variables_reach_the_template(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.chat("hi", max_tokens=1, chat_template_kwargs={"mood": "xyz"})
        assert answer.json()["usage"]["prompt_tokens"] == 5

    run_lab(test)


def test_a_seed_gives_the_same_text_among_others(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        fields = {"temperature": 1.0, "seed": 11, "max_tokens": 15}
        alone = (await lab.chat("hello", **fields)).json()["choices"]
        mates = [lab.chat("other", temperature=1.0, max_tokens=20) for _ in range(4)]
        crowd = await asyncio.gather(lab.chat("hello", **fields), *mates)
        assert crowd[0].json()["choices"] == alone

    run_lab(test)
