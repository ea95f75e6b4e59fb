"""The front over scripted replicas: what it passes on, tries again, and tells its clients."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from trtllm_lite.runtime.server.replicas.fleet import QueueFullError, ReplicaLostError
from trtllm_lite.runtime.server.replicas.front import Front
from trtllm_lite.runtime.server.replicas.messages import Piece
from trtllm_lite.runtime.server.service import Service
from trtllm_lite.runtime.server.settings import Limits, ServerConfig, key_digest

FleetOf = Callable[..., Any]
JSON = ((b"content-type", b"application/json"), (b"content-length", b"2"))
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
WHOLE = [Piece(200, JSON, b"{}", True)]
LOST = [ReplicaLostError()]
PATH = "/v1/completions"


def with_client(
    fleet: Any,
    test: Callable[[httpx.AsyncClient, Service, Front], Coroutine[Any, Any, None]],
    config: ServerConfig | None = None,
    *,
    is_open: bool = True,
) -> None:
    async def main() -> None:
        service = Service(config or ServerConfig())
        front = Front(service, fleet, "9.9")
        if is_open:
            service.phase = "ready"
        transport = httpx.ASGITransport(front.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await asyncio.wait_for(test(client, service, front), 10)

    asyncio.run(main())


def test_a_request_goes_on_as_it_came_and_its_answer_comes_back(fleet_of: FleetOf) -> None:
    fleet = fleet_of([Piece(200, JSON), Piece(body=b"{"), Piece(body=b"}", last=True)])

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        headers = {"x-request-id": "mine", "content-type": "application/json", "x-api-key": "k"}
        answer = await client.post(PATH + "?a=b", content=b'{"a":1}', headers=headers)
        assert (answer.status_code, answer.content) == (200, b"{}")
        assert answer.headers["x-request-id"] == "mine"
        (sent,) = fleet.sent
        assert (sent.method, sent.path, sent.query) == ("POST", PATH, b"a=b")
        assert (sent.body, dict(sent.headers)[b"x-request-id"]) == (b'{"a":1}', b"mine")
        assert b"x-api-key" not in dict(sent.headers)
        assert (await client.get("/no/such/path")).status_code == 200, "replicas know the routes"
        assert (service.admission.requests, fleet.ended) == (0, 2)

    with_client(fleet, test)


def test_a_replica_that_dies_before_the_first_byte_is_made_up_for(fleet_of: FleetOf) -> None:
    fleet = fleet_of(LOST, WHOLE)

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        assert (await client.post(PATH, content=b"{}")).status_code == 200
        assert len(fleet.sent) == 2
        assert "replica_requests_lost_total 1.0" in (await client.get("/metrics")).text

    with_client(fleet, test)


def test_a_request_that_kills_replicas_is_tried_twice_only(fleet_of: FleetOf) -> None:
    fleet = fleet_of(LOST)

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        answer = await client.post(PATH, content=b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert answer.headers["retry-after"] == "1"
        assert len(fleet.sent) == 2

    with_client(fleet, test)


def test_a_stream_whose_replica_dies_ends_with_an_error(fleet_of: FleetOf) -> None:
    fleet = fleet_of([Piece(200, EVENTS, b"data: {}\n\n"), ReplicaLostError()])

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        answer = await client.post(PATH, content=b"{}")
        first, last, rest = answer.text.split("\n\n")
        assert (answer.status_code, first, rest) == (200, "data: {}", "")
        assert '"code":"replica_lost"' in last
        assert len(fleet.sent) == 1

    with_client(fleet, test)


@pytest.mark.parametrize("how", ["silent end", "died"])
def test_a_body_that_is_cut_off_is_not_passed_for_whole(fleet_of: FleetOf, how: str) -> None:
    end = [ReplicaLostError()] if how == "died" else []
    fleet = fleet_of([Piece(200, JSON, b"{"), *end])

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        with pytest.raises(RuntimeError, match="already started"):
            await client.post(PATH, content=b"{}")
        assert len(fleet.sent) == 1

    with_client(fleet, test)


def test_a_full_queue_is_told(fleet_of: FleetOf) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        answer = await client.post(PATH, content=b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
        assert answer.headers["retry-after"] == "1"
        text = (await client.get("/metrics")).text
        assert 'requests_rejected_total{reason="queue_full",replica="front"} 1.0' in text

    with_client(fleet_of([QueueFullError()]), test)


def test_waiting_for_a_replica_has_an_end(fleet_of: FleetOf) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        fleet.scripts = [[asyncio.Event()]]
        answer = await client.post(PATH, content=b"{}")
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert (fleet.ended, service.admission.requests) == (1, 0)

    fleet = fleet_of([])
    with_client(fleet, test, ServerConfig(request_timeout=0.05))


def test_a_stream_that_has_begun_may_take_longer_than_the_wait(fleet_of: FleetOf) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        later = asyncio.Event()
        fleet.scripts = [[Piece(200, EVENTS, b"a"), later, Piece(body=b"b", last=True)]]
        asyncio.get_running_loop().call_later(0.1, later.set)
        assert (await client.post(PATH, content=b"{}")).text == "ab"

    fleet = fleet_of([])
    with_client(fleet, test, ServerConfig(request_timeout=0.05))


STREAM = b'{"stream": true}'
SOON = ServerConfig(keep_alive_seconds=0.01)
SIGN = ": keep-alive\n\n"


async def asked_for_stream(front: Front, fleet: Any, *rest: Any, path: str = PATH) -> Any:
    """The answer to a client that has been told twice to wait before the script comes to `rest`."""
    told, signs = asyncio.Event(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def watched(message: Any) -> None:
            nonlocal signs
            await send(message)
            signs += message.get("body", b"") == SIGN.encode()
            if signs >= 2:
                told.set()

        await front.app(scope, receive, watched)

    fleet.scripts = [[told, *rest], *fleet.scripts]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, content=STREAM)


def test_who_waits_for_a_stream_is_not_left_in_silence(fleet_of: FleetOf) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        first, last = Piece(200, EVENTS, b"data: {}\n\n"), Piece(body=b"data: 1\n\n", last=True)
        answer = await asked_for_stream(front, fleet, first, last)
        signs, rest = answer.text.split("data: ", 1)
        assert (answer.status_code, rest) == (200, "{}\n\ndata: 1\n\n")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert len(signs) >= 2 * len(SIGN)
        assert signs.replace(SIGN, "") == ""

    fleet = fleet_of()
    with_client(fleet, test, SOON)


def test_who_waits_for_a_whole_answer_sees_nothing_before(fleet_of: FleetOf) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, later.set)
        fleet.scripts = [[later, Piece(400, JSON, b"{}", True)]]
        answer = await client.post(PATH, content=b"{}")
        assert (answer.status_code, answer.text) == (400, "{}")

    fleet = fleet_of()
    with_client(fleet, test, SOON)


@pytest.mark.parametrize(
    ("path", "event"), [(PATH, "data: {}\n\n"), ("/v1/messages", "event: error\ndata: {}\n\n")]
)
def test_a_refusal_that_comes_late_is_an_event(fleet_of: FleetOf, path: str, event: str) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        pieces = Piece(400, JSON, b"{"), Piece(body=b"}", last=True)
        answer = await asked_for_stream(front, fleet, *pieces, path=path)
        assert (answer.status_code, answer.text.replace(SIGN, "")) == (200, event)

    fleet = fleet_of()
    with_client(fleet, test, SOON)


@pytest.mark.parametrize("script", [LOST, [QueueFullError()], []])
def test_an_error_after_a_sign_is_an_event(fleet_of: FleetOf, script: list[Any]) -> None:
    codes = {ReplicaLostError: "replica_lost", QueueFullError: "queue_full"}

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        fleet.scripts = [script]
        answer = await asked_for_stream(front, fleet, *(script or [asyncio.Event()]))
        code = codes[type(script[0])] if script else "deadline_exceeded"
        assert f'"code":"{code}"' in answer.text.replace(SIGN, "")
        assert answer.text.startswith(SIGN)

    fleet = fleet_of()
    with_client(fleet, test, ServerConfig(keep_alive_seconds=0.01, request_timeout=0.2))


def test_who_has_seen_signs_alone_is_served_by_another_replica(fleet_of: FleetOf) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        stream = Piece(200, EVENTS, b"data: {}\n\n", True)
        fleet.scripts = [[stream]]
        answer = await asked_for_stream(front, fleet, *LOST)
        assert answer.text.replace(SIGN, "") == "data: {}\n\n"
        assert len(fleet.sent) == 2

    fleet = fleet_of()
    with_client(fleet, test, SOON)


def test_limits_and_keys_hold_before_a_replica_is_asked(fleet_of: FleetOf) -> None:
    fleet = fleet_of(WHOLE)
    config = ServerConfig(key_digests=(key_digest("k"),), limits=Limits(body_bytes=10, headers=20))

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        assert (await client.post(PATH, content=b"{}")).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/ready")).status_code == 200
        key = {"authorization": "Bearer k"}
        assert (await client.post(PATH, content=b"x" * 11, headers=key)).status_code == 413
        many = {**key, **{f"x-{i}": "y" for i in range(20)}}
        assert (await client.post(PATH, content=b"{}", headers=many)).status_code == 431
        assert fleet.sent == []
        assert (await client.post(PATH, content=b"{}", headers=key)).status_code == 200

    with_client(fleet, test, config)


def test_nobody_is_let_in_before_the_replicas_are_there(fleet_of: FleetOf) -> None:
    fleet = fleet_of(WHOLE)

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        answer = await client.post(PATH, content=b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert fleet.sent == []

    with_client(fleet, test, is_open=False)


def test_metrics_of_all_replicas_are_one_exposition(fleet_of: FleetOf) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        lines = (await client.get("/metrics")).text.splitlines()
        assert 'n_total{a="b",replica="one"} 1.0' in lines
        assert 'n_total{a="b",replica="two"} 2.0' in lines
        assert len([line for line in lines if line.startswith("# TYPE n_total")]) == 1
        types = [line for line in lines if line.startswith("# TYPE")]
        assert len(types) == len(set(types))

    with_client(fleet_of(WHOLE), test)


def test_aborted_requests_end_with_an_error(fleet_of: FleetOf) -> None:
    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        never = asyncio.Event()
        fleet.scripts = [[Piece(200, EVENTS, b"data: {}\n\n"), never], [never]]
        asking = [asyncio.ensure_future(client.post(PATH, content=b"{}")) for _ in range(2)]
        while len(fleet.sent) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        front.abort()
        streamed, whole = await asyncio.gather(*asking)
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "aborted")
        assert '"code":"aborted"' in streamed.text
        assert fleet.ended == 2

    fleet = fleet_of([])
    with_client(fleet, test)


@pytest.mark.parametrize("by_prefix", [True, False])
def test_a_router_by_prefix_is_told_how_the_text_begins(fleet_of: FleetOf, by_prefix: bool) -> None:
    fleet = fleet_of(WHOLE)
    fleet.by_prefix = by_prefix

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        await client.post(PATH, content=b'{"prompt": "Once upon"}')
        await client.get("/v1/models")
        told = [request.prompt for request in fleet.sent]
        assert told == (["Once upon", "/v1/models"] if by_prefix else ["", ""])

    with_client(fleet, test)


def test_what_a_replica_raises_is_told_and_logged(
    fleet_of: FleetOf, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = fleet_of(
        [ValueError("/secret/path")], [Piece(200, EVENTS, b"data: {}\n\n"), KeyError()]
    )

    async def test(client: httpx.AsyncClient, service: Service, front: Front) -> None:
        answer = await client.post(PATH, content=b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in answer.text
        assert "/secret/path" in caplog.text
        assert '"code":"internal_error"' in (await client.post(PATH, content=b"{}")).text
        assert len(fleet.sent) == 2

    with_client(fleet, test)
