"""The HTTP layer, byte by byte, over real sockets: cases 31 to 40 of docs/robustness.md."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.server.lifecycle import LoadProgress, Server
from trtllm_lite.runtime.server.listening import bind
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import Limits, ServerConfig, key_digest

KEY = "key-of-a-client"
AUTH = f"Authorization: Bearer {KEY}\r\n".encode()
HOST = b"Host: test\r\n"
CLOSE = b"Connection: close\r\n"
TEXT = b"POST /v1/completions HTTP/1.1\r\n"
JSON = b"Content-Type: application/json\r\n"
PATIENCE = 30
LIMITS = Limits(header_seconds=2.0, body_seconds=2.0)
CONFIG = ServerConfig(key_digests=(key_digest(KEY),), limits=LIMITS)


@dataclass(frozen=True)
class Live:
    """A server that listens, in a thread of its own."""

    address: tuple[str, int]

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    def send(self, data: bytes) -> bytes:
        """All that comes back until the server closes."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_all(sock)

    def status(self, data: bytes) -> int:
        return status_of(self.send(data))

    def is_alive(self) -> bool:
        return self.status(b"GET /live HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n") == 200


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            piece = sock.recv(2**16)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def status_of(answer: bytes) -> int:
    """0 for none."""
    return int(answer.split(b" ")[1]) if answer else 0


@pytest.fixture(scope="module")
def live(new_llm: Callable[[bool], tuple[AsyncLLM, Any]], card: ModelCard) -> Iterator[Live]:
    llm, _ = new_llm(True)
    ready = threading.Event()

    def load(progress: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        return llm, card

    server = Server(CONFIG, load, lambda service: ready.set(), "9.9")
    sock, loop = bind("127.0.0.1", 0), asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.run(sock)))
    thread.start()
    assert ready.wait(PATIENCE)
    yield Live(sock.getsockname())
    assert server.stops is not None
    for _ in range(2):
        loop.call_soon_threadsafe(server.stops.tell)
    thread.join()
    loop.close()
    sock.close()


@pytest.fixture(autouse=True)
def lively(live: Live) -> Iterator[None]:
    """Whatever a test sends, the server answers afterwards."""
    yield
    assert live.is_alive()


@pytest.mark.parametrize(
    "hosts",
    [b"Host: a/health?\r\n", b"Host: a#\r\n", b"Host: a\r\nHost: health\r\n", b"", b"Host:\r\n"],
)
def test_no_host_header_opens_a_route(live: Live, hosts: bytes) -> None:
    for path in (b"/v1/models", b"/metrics"):
        answer = live.send(b"GET " + path + b" HTTP/1.1\r\n" + hosts + CLOSE + b"\r\n")
        assert status_of(answer) in (400, 401)
        assert b"fake" not in answer


@pytest.mark.parametrize(
    "target",
    [
        *(b"//v1/models", b"/V1/models", b"/v1/../metrics", b"/%2e%2e/metrics", b"/v1/models/"),
        *(b"/health/../v1/models", b"/health%2f..%2fmetrics", b"/live;/../metrics", b"/metrics%00"),
        *(b"/health?/../v1/models", b"http://test/v1/models", b"http://test/health/../metrics"),
        *(b"/%68ealth/../metrics", b"*", b"/live%20/../metrics", b"\\v1\\models"),
    ],
)
def test_no_form_of_a_path_opens_a_route(live: Live, target: bytes) -> None:
    answer = live.send(b"GET " + target + b" HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
    assert b"fake" not in answer
    assert b"trtllm_lite_" not in answer
    if status_of(answer) == 200:
        # A probe, whatever follows in its query.
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["status"] in ("ok", "live")
        assert target.startswith(b"/health?")


def test_the_absolute_form_needs_the_key_and_gets_no_further(live: Live) -> None:
    line = b"GET http://other.test/v1/models HTTP/1.1\r\n"
    assert live.status(line + HOST + CLOSE + b"\r\n") in (400, 401, 404)
    assert live.status(line + HOST + AUTH + CLOSE + b"\r\n") in (200, 400, 404)


@pytest.mark.parametrize(
    "headers",
    [b"X: " + b"y" * 200_000 + b"\r\n", b"".join(b"X-%d: 1\r\n" % i for i in range(5000))],
    ids=["one of 200 kB", "5000"],
)
def test_too_much_of_headers_is_refused(live: Live, headers: bytes) -> None:
    try:
        answer = live.send(b"GET /live HTTP/1.1\r\n" + HOST + CLOSE + headers + b"\r\n")
    except ConnectionError:
        return  # what the server has not read is lost, and perhaps its answer with it
    assert status_of(answer) in (0, 400, 431)


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n0\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"Content-Length: 0x2\r\n\r\n{}",
        b"Content-Length: 1_0\r\n\r\n" + b"{        }",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"X : 1\r\nContent-Length: 2\r\n\r\n{}",
        b"X: a\0b\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_ambiguous_messages_are_refused_and_the_connection_closed(live: Live, rest: bytes) -> None:
    """A second request behind it, smuggled, must never be answered."""
    smuggled = b"GET /live HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n"
    answer = live.send(TEXT + HOST + AUTH + JSON + rest + smuggled)
    assert status_of(answer) in (400, 408, 501)
    assert answer.count(b"HTTP/1.1 ") == 1


def test_two_hundred_slow_senders_hold_up_nobody_and_are_cut_off(live: Live) -> None:
    slow = [live.connect() for _ in range(200)]
    try:
        for i, sock in enumerate(slow):
            head = TEXT + HOST + AUTH + JSON + b"Content-Length: 90\r\n\r\n{"
            sock.sendall(b"GET /li" if i % 2 else head)
        assert live.is_alive()
        answers = [read_all(sock) for sock in slow]
    finally:
        for sock in slow:
            sock.close()
    assert answers[1::2] == [b""] * 100
    assert {status_of(answer) for answer in answers[::2]} == {408}


def test_a_body_that_trickles_is_cut_off(live: Live) -> None:
    """The time counts for the whole body: a byte now and then does not wind it up again."""
    with live.connect() as sock:
        sock.sendall(TEXT + HOST + AUTH + JSON + b"Content-Length: 90000\r\n\r\n")
        end = time.monotonic() + PATIENCE
        sock.settimeout(0.02)
        answer = b""
        while not answer and time.monotonic() < end:
            try:
                sock.sendall(b" ")
                answer = sock.recv(2**16)
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert status_of(answer) in (0, 408)
    assert time.monotonic() < end


def test_a_body_of_ten_thousand_chunks(live: Live) -> None:
    text = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    text = text[:-1] + b" " * (10_000 - len(text)) + b"}"
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    head = TEXT + HOST + AUTH + JSON + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = live.send(head + body)
    assert status_of(answer) == 200
    assert b"text_completion" in answer


@pytest.mark.parametrize("method", [b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"BREW"])
def test_other_methods_are_405_and_cors_is_closed(live: Live, method: bytes) -> None:
    origin = b"Origin: http://a.test\r\nAccess-Control-Request-Method: POST\r\n"
    answer = live.send(
        method + b" /v1/models HTTP/1.1\r\n" + HOST + AUTH + origin + CLOSE + b"\r\n"
    )
    assert status_of(answer) == 405
    head = answer.split(b"\r\n\r\n")[0].lower()
    assert b"\r\nallow: " in head
    assert b"access-control" not in head


def test_head_is_get_without_a_body(live: Live) -> None:
    answer = live.send(b"HEAD /v1/models HTTP/1.1\r\n" + HOST + AUTH + CLOSE + b"\r\n")
    assert status_of(answer) == 200
    assert answer.endswith(b"\r\n\r\n")


def test_pipelined_requests_are_answered_in_order(live: Live) -> None:
    def ask(tokens: int, last: bytes = b"") -> bytes:
        body = json.dumps({"prompt": "a" * tokens, "max_tokens": 1}).encode()
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        return TEXT + HOST + AUTH + JSON + last + length + body

    probe = b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n"
    answer = live.send(ask(1) + probe + ask(2) + ask(3, CLOSE))
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    counts = [answer.index(b'"prompt_tokens":%d' % i) for i in (1, 2, 3)]
    assert counts == sorted(counts)


def test_a_stream_that_is_pipelined_ends_before_the_next_answer(live: Live) -> None:
    body = b'{"prompt": "a", "max_tokens": 5, "stream": true}'
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    stream = TEXT + HOST + AUTH + JSON + length + body
    answer = live.send(stream + b"GET /version HTTP/1.1\r\n" + HOST + AUTH + CLOSE + b"\r\n")
    assert answer.index(b"data: [DONE]") < answer.index(b'"version":"9.9"')


def test_no_answer_tells_a_key(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    for key in (KEY, "another-key"):
        auth = f"Authorization: Bearer {key}\r\n".encode()
        for path in (b"/metrics", b"/v1/capabilities", b"/v1/models", b"/version", b"/nowhere"):
            answer = live.send(b"GET " + path + b" HTTP/1.1\r\n" + HOST + auth + CLOSE + b"\r\n")
            assert key.encode() not in answer
    assert KEY not in caplog.text
    assert "another-key" not in caplog.text
