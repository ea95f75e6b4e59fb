"""POST /v1/completions: prompts of every form, echo, and scores."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.sampling_params import SamplingParams

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]


async def generate(lab: Lab, prompt: Any, **params: Any) -> Any:
    given = SamplingParams(**{"temperature": 0.0, **params})
    if isinstance(prompt, str):
        return await lab.llm.generate(prompt, given)
    return await lab.llm.generate(params=given, prompt_token_ids=prompt)


@pytest.mark.parametrize(
    "prompt",
    ["hello", ["hello", "what", "a day"], [1, 2, 3], [[1, 2, 3], [4]]],
    ids=["text", "texts", "ids", "lists of ids"],
)
@pytest.mark.parametrize("n", [1, 2])
def test_every_prompt_is_answered_in_order(run_lab: RunLab, prompt: Any, n: int) -> None:
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]

    async def test(lab: Lab) -> None:
        want = [await generate(lab, each, max_tokens=7) for each in many]
        made = (await lab.complete(prompt, max_tokens=7, n=n)).json()
        assert [c["index"] for c in made["choices"]] == list(range(len(many) * n))
        texts = [w.outputs[0].text for w in want for _ in range(n)]
        assert [c["text"] for c in made["choices"]] == texts
        assert made["object"] == "text_completion"
        assert made["usage"]["prompt_tokens"] == sum(len(w.prompt_token_ids) for w in want)
        streamed = await lab.complete(prompt, max_tokens=7, n=n, stream=True)
        assert joined(streamed.events()) == dict(enumerate(texts))

    run_lab(test)


def joined(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = defaultdict(str)
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return dict(texts)


def test_sixteen_tokens_unless_asked_otherwise_or_less_where_they_do_not_fit(
    run_lab: RunLab,
) -> None:
    async def test(lab: Lab) -> None:
        made = (await lab.complete("hello", ignore_eos=True)).json()
        assert made["usage"]["completion_tokens"] == 16
        close = (await lab.complete("x" * 60, ignore_eos=True)).json()
        assert close["usage"]["completion_tokens"] == 4
        asked = await lab.complete("x" * 60, max_tokens=16)
        assert (asked.status, asked.error["code"]) == (400, "context_length_exceeded")

    run_lab(test)


@pytest.mark.parametrize("prompt", ["hello", [8, 5, 12, 12, 15]])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(
    run_lab: RunLab, prompt: Any, max_tokens: int, stream: bool
) -> None:
    async def test(lab: Lab) -> None:
        bias = dict.fromkeys(lab.llm.tokenizer.encode("é😀"), -100.0)  # no parts of characters
        scores_of = {"logprobs": 2, "prompt_logprobs": 2, "logit_bias": bias}
        want = await generate(lab, prompt, max_tokens=max(1, max_tokens), **scores_of)
        shown = {str(token): value for token, value in bias.items()}
        fields = {"max_tokens": max_tokens, "echo": True, "logprobs": 2, "logit_bias": shown}
        fields["stream"] = stream
        answer = await lab.complete(prompt, **fields)
        (choice,) = whole_choices(answer.events()) if stream else answer.json()["choices"]
        ids = list(want.prompt_token_ids)
        text = lab.llm.tokenizer.decode(ids, skip_special_tokens=False)
        made = want.outputs[0] if max_tokens else None
        assert choice["text"] == text + (made.text if made else "")
        scores = choice["logprobs"]
        raw = [*want.prompt_logprobs, *(made.logprobs if made else [])]
        raw = raw[: len(scores["tokens"])]
        assert len(raw) >= len(ids)
        taken = [None if r is None else next(iter(r.values())).logprob for r in raw]
        assert scores["token_logprobs"] == taken
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        assert "".join(scores["tokens"]) == choice["text"]
        starts = [sum(map(len, scores["tokens"][:i])) for i in range(len(scores["tokens"]))]
        assert scores["text_offset"] == starts
        best = [max(r.values(), key=lambda x: x.logprob).logprob for r in raw[1:]]
        assert [max(t.values()) for t in scores["top_logprobs"][1:]] == best

    run_lab(test)


def whole_choices(events: list[Any]) -> list[Any]:
    """Streamed choices put together."""
    made: dict[int, Any] = {}
    for event in events[:-1]:
        for part in event["choices"]:
            choice = made.setdefault(
                part["index"], {"text": "", "logprobs": defaultdict(list), "finish_reason": None}
            )
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"][name] += values
    return [made[index] for index in sorted(made)]


def test_a_scored_prompt_has_no_completion(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        made = (await lab.complete("hello", max_tokens=0, echo=True)).json()
        assert made["usage"]["completion_tokens"] == 0
        assert made["choices"][0]["text"] == "hello"
        assert made["choices"][0]["logprobs"] is None
        assert made["choices"][0]["finish_reason"] == "length"

    run_lab(test)


@pytest.mark.parametrize("prompt", [[500], [[1], [500]], "z" * 70, ["a", "z" * 70]])
def test_one_bad_prompt_refuses_all(run_lab: RunLab, prompt: Any) -> None:
    async def test(lab: Lab) -> None:
        for fields in ({}, {"stream": True}, {"echo": True}):
            answer = await lab.complete(prompt, max_tokens=2, **fields)
            assert (answer.status, answer.error["param"]) == (400, "prompt")
        await lab.idle()
        assert await lab.metric("requests_accepted_total") == 0

    run_lab(test)


def test_more_choices_than_slots_run_in_turns(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        want = await generate(lab, "hello", max_tokens=3)
        made = (await lab.complete(["hello"] * 5, n=2, max_tokens=3)).json()
        assert [c["text"] for c in made["choices"]] == [want.outputs[0].text] * 10

    run_lab(test)
