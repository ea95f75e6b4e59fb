"""Clients that leave, crowds, faults, and what of one request must not show in another: cases 41 to
61 of docs/robustness.md, beside those of the other files."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.grammar_compiler import GrammarLimits
from trtllm_lite.runtime.server.settings import ServerConfig

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
LONG = {"messages": MESSAGES, "max_tokens": 50, "ignore_eos": True}


async def outcomes(lab: Lab) -> dict[str, float]:
    """Of all requests so far, checked to add up."""
    names = ("accepted", "finished", "aborted", "failed")
    made = {name: await lab.metric(f"requests_{name}_total") for name in names}
    assert made["accepted"] == made["finished"] + made["aborted"] + made["failed"]
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_a_slot_is_free_one_step_after_its_client_has_left(run_lab: RunLab, stream: bool) -> None:
    """The step that runs is not interrupted; none follows it."""

    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, {**LONG, "stream": stream})
        lab.session.permits.release(4)
        if stream:
            await live.until(lambda answer: b"content" in answer.body)
        while lab.session.permits._value:
            await asyncio.sleep(0.001)
        live.leave()
        await live.task
        lab.session.permits.release(1)
        await lab.idle()
        assert (await lab.llm.stats()).kv_tokens_used == 0
        assert await outcomes(lab) == {"accepted": 1, "finished": 0, "aborted": 1, "failed": 0}

    run_lab(test, is_open=False)


def test_one_that_leaves_the_queue_leaves_it_at_once(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        ahead = [lab.start("POST", CHAT, LONG) for _ in range(3)]
        while (await stepping(lab)).running < 3:
            continue
        waits = lab.start("POST", CHAT, LONG)
        while (await stepping(lab)).waiting < 1:
            continue
        waits.leave()
        await waits.task
        assert (await stepping(lab)).waiting == 0
        lab.session.permits.release(10_000)
        answers = [await live.whole() for live in ahead]
        assert [answer.status for answer in answers] == [200] * 3
        assert await outcomes(lab) == {"accepted": 4, "finished": 3, "aborted": 1, "failed": 0}

    run_lab(test, is_open=False)


async def stepping(lab: Lab) -> Any:
    """The engine's numbers, which it tells between two steps: it gets permits for as many."""
    asking = asyncio.ensure_future(lab.llm.stats())
    while not asking.done():
        lab.session.permits.release(1)
        await asyncio.sleep(0.001)
    return await asking


def test_after_a_crowd_of_impatient_clients_one_more_is_answered(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        before = (await lab.chat("hello", max_tokens=5)).json()["choices"]
        crowd = [lab.start("POST", CHAT, {**LONG, "stream": i % 2 == 0}) for i in range(200)]
        await asyncio.sleep(0.05)
        for live in crowd:
            live.leave()
        answers = await asyncio.gather(*(live.whole() for live in crowd))
        turned_away = [answer for answer in answers if answer.status == 503]
        assert turned_away
        assert all(answer.headers["retry-after"] for answer in turned_away)
        assert (await lab.chat("hello", max_tokens=5)).json()["choices"] == before
        await lab.idle()
        assert (await outcomes(lab))["failed"] == 0

    run_lab(test)


def test_memory_that_runs_out_in_a_step_is_503_and_the_next_request_is_served(
    run_lab: RunLab,
) -> None:
    async def test(lab: Lab) -> None:
        before = (await lab.chat("hello", max_tokens=5)).json()["choices"]
        for stream in (False, True):
            lab.session.fail_next(1, MemoryError("cannot allocate 5 bytes"))
            answer = await lab.post(CHAT, {**LONG, "stream": stream})
            answer.check_refused(503)
            assert answer.error["code"] == "out_of_memory"
            assert answer.headers["retry-after"]
        assert (await lab.get("/health")).status == 200
        assert (await lab.chat("hello", max_tokens=5)).json()["choices"] == before

    run_lab(test)


@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_a_clock_that_is_set_changes_nothing(
    run_lab: RunLab, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Deadlines, keep-alives and measured times go by the clock that nobody sets."""
    real = time.time

    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, {**LONG, "stream": True})
        lab.session.permits.release(2)
        await live.until(lambda answer: b"content" in answer.body)
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        await asyncio.sleep(0.05)
        lab.session.permits.release(10_000)
        answer = await live.whole()
        assert answer.events()[-1] == "[DONE]"
        assert b": keep-alive" not in answer.body
        await lab.idle()
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert 0 <= await lab.metric(f"{name}_seconds_sum") < 20

    run_lab(test, ServerConfig(request_timeout=19, keep_alive_seconds=15), is_open=False)


def test_streams_of_fifty_prompts_with_choices_are_their_answers(run_lab: RunLab) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"

    async def test(lab: Lab) -> None:
        for i in range(50):
            prompt = letters[i % 26] + letters[i % 7 : i % 7 + 1 + i % 11]
            fields = {"n": 1 + i % 3, "seed": i, "temperature": 1.0, "max_tokens": 6}
            whole, streamed = await asyncio.gather(
                lab.complete(prompt, **fields), lab.complete(prompt, **fields, stream=True)
            )
            texts = {c["index"]: c["text"] for c in whole.json()["choices"]}
            made = dict.fromkeys(texts, "")
            for event in streamed.events()[:-1]:
                for choice in event["choices"]:
                    made[choice["index"]] += choice["text"]
            assert made == texts

    run_lab(test)


def test_nothing_of_a_request_stays_in_its_slot(run_lab: RunLab) -> None:
    """Over and over in three slots: penalties, biases, stops and grammars before a plain one."""
    marked: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": {"1": 100}},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"stop_token_ids": [5, 6, 7], "min_tokens": 3},
        {"guided_regex": "[ab]{4}"},
        {"temperature": 2.0, "seed": 9, "top_k": 2, "min_p": 0.5},
        {"logprobs": True, "top_logprobs": 5},
    )

    async def test(lab: Lab) -> None:
        plain = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        want = (await lab.chat("plain", **plain)).json()["choices"]
        for i in range(34):
            fields = {"max_tokens": 6, **marked[i % len(marked)]}
            mates = [lab.chat(f"other{'x' * (i % 5)}", **fields) for _ in range(2)]
            answers = await asyncio.gather(lab.chat("plain", **plain), *mates)
            assert [answer.status for answer in answers] == [200] * 3
            assert answers[0].json()["choices"] == want
            assert (await lab.chat("plain", **plain)).json()["choices"] == want

    run_lab(test)


def test_metrics_answer_while_a_step_hangs_and_change_nothing(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, LONG)
        while await lab.metric("requests_accepted_total") < 1:
            await asyncio.sleep(0.001)
        first = await lab.get("/metrics")
        assert (await lab.get("/metrics")).body == first.body
        lab.session.permits.release(10_000)
        assert (await live.whole()).status == 200

    run_lab(test, is_open=False)


def test_a_cache_salt_is_refused_by_name(run_lab: RunLab) -> None:
    """The prefix cache is shared: who asks to be kept apart is told, not ignored."""

    async def test(lab: Lab) -> None:
        answer = await lab.chat(cache_salt="tenant")
        answer.check_refused()
        assert answer.error["param"] == "cache_salt"

    run_lab(test)


def test_many_grammars_do_not_stay(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        compiler = lab.llm._maker._grammars
        sizes = []
        for i in range(200):
            answer = await lab.complete("a", guided_regex=f"a{{{i + 1}}}", max_tokens=1)
            assert answer.status == 200
            sizes.append(compiler.num_cached)
        assert sizes[-1] == sizes[-100] == GrammarLimits().cache_entries

    run_lab(test)
