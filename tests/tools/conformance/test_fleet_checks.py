"""The checks of several servers behind one address tell good from bad."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from trtllm_lite.tools.conformance import balancers, ray_replicas
from trtllm_lite.tools.conformance.fleet_clients import (
    event_times,
    samples,
    short,
    stream_end,
    texts_agree,
    whole_end,
)
from trtllm_lite.tools.conformance.processes import descendants, reachable, title

EVENT = 'data: {"choices": []}\n\n'
GOOD = ray_replicas.Findings(
    to_ready=9,
    shares=(10, 22),
    first_event=0.1,
    last_event=2,
    freed_after_leaving=0.5,
    cut=2,
    answered=8,
    silent=0,
    refused_after=0,
    slowest_after=1,
    replica_back=9,
    reachable=(),
    exit_code=0,
    left_behind=0,
)
ENDED = {"cut": 0, "answered": 6, "silent": 0, "failed": 0}
BALANCED = balancers.Findings("x", (9, 8), 0.1, 2, 0.5, {**ENDED, "cut": 3}, ENDED)
Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://test")


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (EVENT + "data: [DONE]\n\n", "answered"),
        (EVENT + 'data: {"error": {"code": "replica_lost"}}\n\n', "cut"),
        (EVENT, "silent"),
        ("", "silent"),
    ],
)
def test_how_a_stream_ended(body: str, end: str) -> None:
    async def main() -> None:
        async with client_of(lambda request: httpx.Response(200, text=body)) as client:
            assert await stream_end(client) == end
            assert len(await event_times(client)) == body.count("data: {")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "end"),
    [(httpx.ReadTimeout("slow"), "silent"), (httpx.RemoteProtocolError("broken"), "cut")],
)
def test_a_broken_connection_is_seen_and_a_silent_one_is_not(error: Exception, end: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    async def main() -> None:
        async with client_of(fail) as client:
            assert await stream_end(client) == await whole_end(client) == end

    asyncio.run(main())


def test_a_short_request_is_tried_again_as_often_as_allowed() -> None:
    statuses = iter((503, 500, 200, 503, 503))

    async def main() -> None:
        async with client_of(lambda request: httpx.Response(next(statuses))) as client:
            timed = await short(client, retries=2)
            assert (timed.status, timed.tries) == (200, 3)
            timed = await short(client, retries=1)
            assert (timed.status, timed.tries) == (503, 2)

    asyncio.run(main())


def test_answers_that_differ_are_found() -> None:
    texts = iter("aaab")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [{"text": next(texts)}]})

    async def main() -> None:
        async with client_of(answer) as client:
            assert await texts_agree(client, 2) == "a"
            with pytest.raises(ValueError, match="'a', 'b'"):
                await texts_agree(client, 2)

    asyncio.run(main())


def test_samples_are_of_one_metric() -> None:
    text = '# HELP n N.\nn{a="b"} 2.0\nn 1.0\nn_other 5.0\n'

    async def main() -> None:
        async with client_of(lambda request: httpx.Response(200, text=text)) as client:
            assert await samples(client, "n") == {'n{a="b"}': 2.0, "n": 1.0}

    asyncio.run(main())


def test_good_findings_have_no_problems() -> None:
    assert GOOD.problems() == []
    assert BALANCED.problems() == []


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, shares=(0, 32)),
        replace(GOOD, last_event=0.1),
        replace(GOOD, freed_after_leaving=9),
        replace(GOOD, cut=0),
        replace(GOOD, silent=1),
        replace(GOOD, refused_after=1),
        replace(GOOD, reachable=("00000000:1F90",)),
        replace(GOOD, exit_code=-6),
        replace(GOOD, left_behind=1),
        replace(BALANCED, shares=(0, 17)),
        replace(BALANCED, last_event=0.1),
        replace(BALANCED, freed_after_leaving=9),
        replace(BALANCED, killed={**ENDED, "silent": 1}),
        replace(BALANCED, killed={**ENDED, "failed": 1}),
        replace(BALANCED, drained={**ENDED, "failed": 1}),
        replace(BALANCED, drained={**ENDED, "cut": 1}),
    ],
)
def test_each_bad_finding_is_one_problem(
    bad: "ray_replicas.Findings | balancers.Findings",
) -> None:
    assert len(bad.problems()) == 1


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("host", "count"), [("127.0.0.1", 0), ("0.0.0.0", 1), ("::1", 0), ("::", 1)]
)
def test_sockets_that_others_reach_are_found(host: str, count: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listening:
        port = f":{listening.getsockname()[1]:04X}"
        assert len([a for a in reachable([os.getpid()]) if a.endswith(port)]) == count


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_processes_below_one_are_found_until_they_end() -> None:
    code = "print('up', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        # Its command line is there once it runs.
        assert child.stdout.readline() == b"up\n"
        assert child.pid in descendants(os.getpid())
        assert "input()" in title(child.pid)
    finally:
        child.communicate(b"\n")
    assert child.pid not in descendants(os.getpid())
    assert title(child.pid) == ""
