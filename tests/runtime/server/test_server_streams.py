"""What happens to a request on its way: clients that leave or stall, faults, deadlines, queues."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.server.settings import ServerConfig

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

MESSAGES = [{"role": "user", "content": "hello"}]
LONG = {"messages": MESSAGES, "max_tokens": 50, "ignore_eos": True}
CHAT = "/v1/chat/completions"


async def entered(lab: Lab) -> None:
    """The engine is inside a step."""
    while not lab.session.entered.is_set():
        await asyncio.sleep(0.001)


async def account(lab: Lab) -> dict[str, float]:
    """The outcomes, checked to add up."""
    names = ("accepted", "finished", "aborted", "failed")
    made = {name: await lab.metric(f"requests_{name}_total") for name in names}
    assert made.pop("accepted") == sum(made.values())
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["computing", "streaming", "waiting"])
def test_a_client_that_leaves_frees_its_slot(run_lab: RunLab, stream: bool, when: str) -> None:
    async def test(lab: Lab) -> None:
        others = 3 if when == "waiting" else 0
        ahead = [lab.start("POST", CHAT, LONG) for _ in range(others)]
        await asyncio.sleep(0.01 if others else 0)
        live = lab.start("POST", CHAT, {**LONG, "stream": stream})
        await entered(lab)
        if when == "streaming":
            lab.session.permits.release(3)
            if stream:
                await live.until(lambda answer: b"content" in answer.body)
        await asyncio.sleep(0.01)
        live.leave()
        for each in ahead:
            each.leave()
        await live.task
        lab.session.permits.release(1000)
        await lab.idle()
        made = await account(lab)
        left = await lab.metric("requests_rejected_total")
        assert (made["finished"], made["failed"]) == (0, 0)
        assert made["aborted"] + left == 1 + others
        assert not live.answer.body.endswith(b"[DONE]\n\n")
        assert (await lab.chat("hello", max_tokens=3)).status == 200

    run_lab(test, is_open=False)


def test_a_client_that_takes_nothing_is_dropped(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, {**LONG, "stream": True})
        live.reading.clear()
        other = await lab.chat("hello", max_tokens=20)
        assert other.status == 200
        await live.task
        await lab.idle()
        assert await account(lab) == {"finished": 1, "aborted": 1, "failed": 0}

    run_lab(test, ServerConfig(stall_seconds=0.05))


def test_a_silent_stream_gets_comments(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, {**LONG, "stream": True})
        await live.until(lambda answer: answer.body.count(b": keep-alive\n\n") >= 2)
        assert live.answer.status == 200
        lab.session.permits.release(1000)
        answer = await live.whole()
        assert answer.events()[-1] == "[DONE]"
        assert answer.events()[0]["choices"][0]["delta"]["role"] == "assistant"

    run_lab(test, ServerConfig(keep_alive_seconds=0.01), is_open=False)


def test_a_fault_before_the_first_token_is_a_status(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for stream in (False, True):
            lab.session.fail_next(1, RuntimeError("no memory at /some/where/else left"))
            answer = await lab.post(CHAT, {**LONG, "stream": stream})
            assert (answer.status, answer.error["type"]) == (500, "server_error")
            assert "/some" not in answer.error["message"]
        assert (await lab.chat("hello", max_tokens=3)).status == 200
        assert await account(lab) == {"finished": 1, "aborted": 0, "failed": 2}

    run_lab(test)


def test_a_fault_later_is_the_last_event(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, {**LONG, "stream": True})
        lab.session.permits.release(2)
        await live.until(lambda answer: b'"content"' in answer.body)
        lab.session.fail_next(1)
        lab.session.permits.release(1000)
        answer = await live.whole()
        assert answer.status == 200
        assert answer.events()[-1]["error"]["type"] == "server_error"
        assert await account(lab) == {"finished": 0, "aborted": 0, "failed": 1}

    run_lab(test, is_open=False)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_ends_a_request(run_lab: RunLab, stream: bool) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.post(CHAT, {**LONG, "stream": stream})
        assert (answer.status, answer.error["code"]) == (503, "deadline_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        lab.session.permits.release(1000)
        await lab.idle()
        made = await account(lab)
        assert (made["finished"], made["aborted"]) == (0, 0)
        # On a busy machine the time may be up before the engine has it.
        assert made["failed"] + await lab.metric("requests_rejected_total") == 1

    run_lab(test, ServerConfig(request_timeout=0.05), is_open=False)


def test_the_deadline_of_a_stream_under_way_is_an_event(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, {**LONG, "stream": True})
        lab.session.permits.release(2)
        answer = await live.whole()
        assert answer.status == 200
        assert answer.events()[-1]["error"]["code"] == "deadline_exceeded"

    run_lab(test, ServerConfig(request_timeout=1.0), is_open=False)


def test_a_dead_engine_is_told_at_once(run_lab: RunLab, caplog: pytest.LogCaptureFixture) -> None:
    async def test(lab: Lab) -> None:
        lives = [lab.start("POST", CHAT, {**LONG, "stream": s}) for s in (True, False)]
        await entered(lab)
        lab.session.fatal = True
        lab.session.permits.release(1000)
        for live in lives:
            answer = await live.whole()
            assert (answer.status, answer.error["code"]) == (503, "engine_dead")
        for path in ("/health", "/ready", "/live"):
            assert (await lab.get(path)).status == 503
        assert (await lab.chat()).status == 503
        assert lab.service.died.is_set()
        assert (await account(lab))["finished"] == 0

    run_lab(test, is_open=False)
    assert "the engine thread died" in caplog.text


def test_health_notices_a_dead_engine_without_a_request(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        assert (await lab.get("/health")).status == 200
        await lab.llm.close()
        answer = await lab.get("/health")
        assert (answer.status, answer.json()["status"]) == (503, "dead")

    run_lab(test)


def test_exactly_the_surplus_is_turned_away(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        inside = 3 + 4
        lives = [lab.start("POST", CHAT, {**LONG, "max_tokens": 4}) for _ in range(inside + 5)]
        await asyncio.sleep(0.05)
        turned_away = [live for live in lives if live.answer.status == 503]
        assert len(turned_away) == 5
        for live in turned_away:
            assert live.answer.error["code"] == "queue_full"
            assert int(live.answer.headers["retry-after"]) > 0
        lab.session.permits.release(1000)
        answers = await asyncio.gather(*(live.whole() for live in lives))
        assert sorted(a.status for a in answers) == [200] * inside + [503] * 5
        assert await lab.metric("requests_rejected_total") == 5
        assert await account(lab) == {"finished": inside, "aborted": 0, "failed": 0}
        assert (await lab.chat("hello", max_tokens=1)).status == 200

    run_lab(test, ServerConfig(max_queue=4), is_open=False)


def test_draining_lets_nobody_in_and_running_ones_end(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, LONG)
        await entered(lab)
        lab.service.drain()
        answer = await lab.chat()
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert answer.headers["retry-after"]
        assert (await lab.get("/health")).status == 503
        assert (await lab.get("/live")).status == 200
        lab.session.permits.release(1000)
        assert (await live.whole()).status == 200

    run_lab(test, is_open=False)


def test_many_that_leave_at_random_leave_nothing_behind(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        lives = []
        for i in range(40):
            lives.append(lab.start("POST", CHAT, {**LONG, "stream": i % 2 == 0}))
            if i % 3 == 0:
                await asyncio.sleep(0)
            if i % 4 == 0:
                lives[i // 2].leave()
        await asyncio.gather(*(live.task for live in lives))
        await lab.idle()
        gc.collect()
        made = await account(lab)
        assert made["failed"] == 0
        assert made["finished"] > 0

    run_lab(test)
