"""The load of `bench --server`: a program of its own, so that its work is not the server's.

It takes commands from stdin and gives results on stdout, one JSON object a line. A client could
hardly do less: one thread, plain sockets that are connected before the clock starts, and bytes
that are stored with the time of their arrival and read as events only after the last one.
"""

import json
import re
import resource
import selectors
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

PATIENCE = 300.0
"""Seconds after which a server that says nothing is given up."""
COMMENT = b": keep-alive\n\n"
_EVENT = re.compile(rb"data: (\{[^\n]*\})\n\n")


@dataclass(frozen=True)
class Timing:
    """One request, in seconds of its own process's clock. `first`: the first text; `last`: the
    part that says why it ended."""

    start: float
    first: float
    last: float
    tokens: int


class Stream:
    """A request on a connection of its own, and what came back."""

    def __init__(self, address: tuple[str, int], path: str, body: dict[str, Any]) -> None:
        self.start = 0.0
        self.ended = False
        self.parts: list[bytes] = []
        self.times: list[float] = []
        self.socket = socket.create_connection(address, timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = _request(path, json.dumps(body).encode())

    def send(self) -> None:
        """The clock starts."""
        self.start = time.perf_counter()
        self.socket.sendall(self._request)

    def take(self) -> None:
        """What has arrived."""
        data = self.socket.recv(65536)
        if data:
            self.times.append(time.perf_counter())
            self.parts.append(data)
        else:
            self.ended = True

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)

    def timing(self) -> Timing:
        """Raises ValueError for an answer that is not a whole stream."""
        data = self.data
        if not data.startswith(b"HTTP/1.1 200 "):
            raise ValueError(f"the server answered {data[:300].decode(errors='replace')!r}")
        ends = list(accumulate(map(len, self.parts)))
        first, last, tokens = 0.0, 0.0, 0
        for match in _EVENT.finditer(data):
            event, arrived = json.loads(match[1]), self.times[bisect_left(ends, match.end())]
            for choice in event.get("choices", []):
                first = first or (arrived if choice.get("text") else 0.0)
                last = arrived if choice.get("finish_reason") else last
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if not (last and tokens):
            raise ValueError(f"a stream without an end: {data[-300:].decode(errors='replace')!r}")
        return Timing(self.start, first or last, last, tokens)


def _request(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def read_until(streams: Sequence[Stream], enough: int, seconds: float, mark: bytes = b"") -> int:
    """Read until `enough` streams have ended, or have `mark` among what they got; how many have.
    Raises TimeoutError."""
    done: set[Stream] = set()
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while len(done) < enough:
            ready = selector.select(deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"{len(done)} of {enough} streams after {seconds:g} s")
            for key, _ in ready:
                stream = key.data
                stream.take()
                if stream.ended:
                    selector.unregister(stream.socket)
                if stream.ended or (mark and mark in stream.parts[-1]):
                    done.add(stream)
    return len(done)


class Client:
    """Runs commands. `load`: streams that start together, read to their end. `hold`: streams that
    are left open once each has had a comment; `release` closes them."""

    def __init__(self) -> None:
        self._held: list[Stream] = []

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        """The result of one command. Raises OSError, ValueError."""
        if command["do"] == "release":
            for stream in self._held:
                stream.socket.close()
            self._held.clear()
            return {}
        address = (command["host"], command["port"])
        streams = [Stream(address, command["path"], body) for body in command["bodies"]]
        return self._hold(streams) if command["do"] == "hold" else self._load(streams)

    def _load(self, streams: list[Stream]) -> dict[str, Any]:
        before = cpu_seconds()
        for stream in streams:
            stream.send()
        read_until(streams, len(streams), PATIENCE)
        spent = cpu_seconds() - before
        for stream in streams:
            stream.socket.close()
        return {"timings": [asdict(s.timing()) for s in streams], "cpu_seconds": spent}

    def _hold(self, streams: list[Stream]) -> dict[str, Any]:
        """The first stream keeps the one slot busy; the others wait."""
        self._held += streams
        streams[0].send()
        read_until(streams[:1], 1, PATIENCE, mark=b"data: ")
        waiting = streams[1:]
        for stream in waiting:
            stream.send()
        read_until(waiting, len(waiting), PATIENCE, mark=COMMENT)
        return {"waiting": sum(b"data: " not in s.data and not s.ended for s in waiting)}


def cpu_seconds() -> float:
    """Of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    client = Client()
    for line in sys.stdin:
        try:
            result = client.run(json.loads(line))
        except (OSError, ValueError) as error:
            result = {"error": str(error)}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
