"""A soak in small, with a tiny bundle: everything but the figures of time."""

import asyncio
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.tools.soak.client import numbers, tokens_of
from trtllm_lite.tools.soak.cycles import files_in
from trtllm_lite.tools.soak.kinds import Load, UnexpectedAnswerError, check, whole
from trtllm_lite.tools.soak.load import Tally, _one
from trtllm_lite.tools.soak.run import Plan, soak
from trtllm_lite.tools.soak.samples import children_of, is_running, sample
from trtllm_lite.tools.soak.sizes import Sizes
from trtllm_lite.tools.soak.verdict import bounds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TIMED = ("slope", "seconds", "drift", "threads")
"""Words of bounds that hold for a longer run only, and on a machine that is not busy."""
SMALL = Plan(minutes=0.05, workers=6, short=40, schemas=40, cancels=0, cycles=0)


def test_a_small_soak_holds(tiny_bundle: Path, tmp_path: Path) -> None:
    told: list[str] = []
    log = tmp_path / "log"
    found = asyncio.run(soak(tiny_bundle, SMALL, tmp_path, log, told.append))
    broken = [bound for bound in bounds(found) if not bound.holds]
    untimed = [b for b in broken if not any(word in b.name for word in TIMED)]
    assert untimed == [], (found.tally["faults"], log.read_text()[-2000:])
    assert sum(found.tally["requests"].values()) > 20
    assert found.samples
    assert "a crowd" in told
    assert found.numbers["requests_finished_total"] > 50


def test_a_server_that_does_not_start_is_one_line(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "bundle.json").write_bytes((tiny_bundle / "bundle.json").read_bytes())
    with pytest.raises(TrtllmLiteError, match=r"^the server does not start: error: .*files"):
        asyncio.run(soak(bundle, SMALL, tmp_path, tmp_path / "log", lambda line: None))


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    (tmp_path / "bundle" / ".cache").mkdir(parents=True)
    (tmp_path / "bundle" / ".cache" / "packed").touch()
    before = files_in(tmp_path)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "x").touch()
    assert files_in(tmp_path) - before == {"tmp", "tmp/x"}


def test_a_process_is_sampled() -> None:
    before = sample(os.getpid(), 0.0)
    with subprocess.Popen(["/bin/sleep", "60"]) as child, Path(os.devnull).open("rb"):
        waits = threading.Event()
        thread = threading.Thread(target=waits.wait)
        thread.start()
        during = sample(os.getpid(), 0.0)
        assert child.pid in children_of(os.getpid())
        assert is_running(child.pid)
        waits.set()
        thread.join()
        child.kill()
        child.wait()
        assert not is_running(child.pid)
    assert during.children == before.children + 1
    assert during.threads == before.threads + 1
    assert during.descriptors > before.descriptors
    assert before.rss > 2**20


def test_a_stream_is_whole_when_it_says_so() -> None:
    def chunk(text: str) -> str:
        return f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'

    whole_stream = chunk("a") + ": keep-alive\n\n" + chunk("b") + "data: [DONE]\n\n"
    assert tokens_of(whole_stream) == ("ab", True)
    assert tokens_of(chunk("a")) == ("a", False)
    failed = chunk("a") + 'data: {"error": {}}\n\n' + "data: [DONE]\n\n"
    assert tokens_of(failed) == ("a", False)


def test_metrics_are_summed_over_their_labels() -> None:
    text = '# HELP x\ntrtllm_lite_x_total{reason="a"} 1.0\ntrtllm_lite_x_total{reason="b"} 2.0\n'
    assert numbers(text + "other 5\n") == {"x_total": 3.0}


@pytest.mark.parametrize(
    ("status", "headers", "lost"),
    [(200, {}, 0), (503, {"retry-after": "1"}, 0), (503, {}, 1), (500, {}, 1), (400, {}, 1)],
)
def test_what_a_request_must_get(status: int, headers: dict[str, str], lost: int) -> None:
    async def main() -> Tally:
        def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(status, headers=headers, json={})

        tally, transport = Tally(), httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await _one(whole, Load(http, random.Random(0), Sizes.of(128)), tally)
        return tally

    tally = asyncio.run(main())
    assert (tally.lost, len(tally.faults), tally.requests["whole"]) == (lost, lost, 1)


def test_a_connection_that_breaks_is_a_lost_request() -> None:
    async def main() -> Tally:
        def answer(request: httpx.Request) -> httpx.Response:
            raise httpx.ReadError("gone")

        tally, transport = Tally(), httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await _one(whole, Load(http, random.Random(0), Sizes.of(128)), tally)
        return tally

    assert asyncio.run(main()).lost == 1


def test_busy_is_told_apart_from_wrong() -> None:
    request: Any = httpx.Request("GET", "http://test/x")
    assert check(httpx.Response(200, request=request), 200)
    assert not check(httpx.Response(503, headers={"retry-after": "1"}, request=request), 200)
    with pytest.raises(UnexpectedAnswerError, match="GET /x got 500"):
        check(httpx.Response(500, request=request), 200)
