"""What the runner asks a worker, as JSON lines: one request, one reply.

A request is an object with "op" and the operation's arguments; a reply is {"value": ...} or
{"error": "one line"}. An error of the runtime is an answer; the worker lives on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import IO, Any

from trtllm_lite.tools.compare_peers.adapters.base import Adapter, Clock, LoadSpec
from trtllm_lite.tools.compare_peers.quality import score

Handler = Callable[..., Any]


class ProtocolError(Exception):
    """The other side said something that is not the protocol, or nothing."""


class Service:
    """The operations of a worker, on one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._operations: Mapping[str, Handler] = {
            "load": self.load,
            "stream": self.stream,
            "batch": self.batch,
            "score": self.score,
            "about": self.about,
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        arguments = dict(request)
        try:
            value = self._operations[arguments.pop("op")](**arguments)
        except Exception as error:
            text = " ".join(str(error).split()) or "no message"
            return {"error": f"{type(error).__name__}: {text}"}
        return {"value": value}

    def load(self, path: str, threads: int, slots: int, max_len: int) -> dict[str, float]:
        """Seconds from before the runtime's import until the model is ready."""
        clock = Clock()
        self._adapter.load(path, LoadSpec(threads, slots, max_len))
        return {"seconds": clock()}

    def stream(self, prompt: list[int], new: int) -> dict[str, Any]:
        """When each token of one request came. Raises RuntimeError when they are not `new`."""
        stream = self._adapter.stream(prompt, new)
        if not len(stream.times) == len(stream.tokens) == new:
            got = f"{len(stream.tokens)} tokens at {len(stream.times)} times"
            raise RuntimeError(f"asked for {new} tokens, got {got}")
        return asdict(stream)

    def batch(self, prompts: list[list[int]], new: int) -> dict[str, float]:
        """Seconds for all of several requests. Raises RuntimeError when one got too few tokens."""
        clock = Clock()
        counts = self._adapter.batch(prompts, new)
        seconds = clock()
        if counts != [new] * len(prompts):
            raise RuntimeError(f"asked for {new} tokens each, got {counts}")
        return {"seconds": seconds}

    def score(self, windows: list[list[int]], reference: str, path: str) -> dict[str, Any]:
        """Quality over windows of text, against float32 logits in the file `reference`."""
        return asdict(score(lambda w: self._adapter.logits(w, path), windows, reference))

    def about(self) -> dict[str, Any]:
        return {"version": self._adapter.version(), "paths": list(self._adapter.paths)}


def serve(service: Service, requests: IO[str], replies: IO[str]) -> None:
    """Answer until the requests end."""
    for line in requests:
        replies.write(json.dumps(service.answer(json.loads(line))) + "\n")
        replies.flush()


def decode_reply(line: str) -> Any:
    """The value of a reply. Raises RuntimeError with the worker's error, or ProtocolError."""
    if not line:
        raise ProtocolError("the worker ended without an answer")
    try:
        reply = json.loads(line)
    except ValueError:
        raise ProtocolError(f"not a reply: {line[:80]!r}") from None
    if not isinstance(reply, dict) or len(reply) != 1 or not reply.keys() <= {"value", "error"}:
        raise ProtocolError(f"not a reply: {line[:80]!r}")
    if "error" in reply:
        raise RuntimeError(reply["error"])
    return reply["value"]
