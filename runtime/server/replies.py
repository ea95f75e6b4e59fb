"""What the two kinds of completions have in common: usage, endings, and the shape of an answer."""

import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trtllm_lite.runtime.outputs import CompletionOutput, Logprob, RequestOutput
from trtllm_lite.runtime.server.errors import ApiError, server_error, unavailable
from trtllm_lite.runtime.server.protocol.common import Sampling
from trtllm_lite.runtime.server.service import Served

Tokens = Sequence[Mapping[int, Logprob] | None]
MEMORY_RETRY_SECONDS = 5
_NO_MEMORY = re.compile(r"\bMemoryError\b|\bbad_alloc\b|Failed to allocate memory")
"""In the message of a step that failed: Python's, C++'s and ONNX Runtime's words for it."""


@dataclass(frozen=True)
class Head:
    """The fields that every part of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, served: Served) -> "Head":
        return cls(
            f"{prefix}-{uuid.uuid4().hex}", int(time.time()), served.name, served.card.fingerprint
        )

    def of(self, kind: str) -> dict[str, Any]:
        """A new JSON object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True)
class UsagePlan:
    """Which parts of a stream carry usage: all of them, one at the end, or none."""

    at_end: bool = False
    continuous: bool = False

    @classmethod
    def of(cls, body: Sampling) -> "UsagePlan":
        options = body.stream_options
        if options is None:
            return cls()
        at_end = bool(options.include_usage)
        return cls(at_end, at_end and bool(options.continuous_usage_stats))


class Reply(Protocol):
    """Turns results into JSON. `outputs` has one result for each prompt, in order."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer that is not streamed."""

    def opening(self) -> list[dict[str, Any]]:
        """What comes before any result."""

    def chunks(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new since the last result of that prompt."""

    def closing(self) -> list[dict[str, Any]]:
        """What comes after all results."""

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """What comes last in a stream that cannot go on."""


def usage(outputs: Iterable[RequestOutput], *, scored_only: bool = False) -> dict[str, Any]:
    """Token counts over all prompts. `scored_only`: nothing was asked to be generated."""
    made = list(outputs)
    prompt = sum(len(o.prompt_token_ids) for o in made)
    completion = 0 if scored_only else sum(len(c.token_ids) for o in made for c in o.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.cached_tokens for o in made)},
    }


def check_ended_well(output: RequestOutput) -> None:
    """Raises ApiError for a result that no client should take for an answer."""
    for choice in output.outputs:
        if choice.finish_reason == "error" and _NO_MEMORY.search(choice.error or ""):
            message = "there is no memory for the request now"
            raise unavailable(message, "out_of_memory", MEMORY_RETRY_SECONDS)
        if choice.finish_reason == "error":
            raise server_error(choice.error or "the engine could not finish the request")
        if choice.finish_reason == "abort":
            raise unavailable("the server stopped the request", "aborted", 5)


def scored_tokens(choice: CompletionOutput) -> Tokens:
    """Logprobs of the tokens that make up the text: the token that ended it is none of them."""
    tokens = choice.logprobs or []
    by_token = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    return tokens[:-1] if by_token else tokens


def likeliest(entry: Mapping[int, Logprob], count: int) -> list[Logprob]:
    """The `count` likeliest alternatives, best first."""
    return sorted(entry.values(), key=lambda each: each.rank)[:count]


class ScoreCursor:
    """Which logprobs of which choice have been sent. A choice is a pair of numbers: its prompt's
    and its own. `scored`: which of a choice's tokens are told at all."""

    def __init__(self, scored: Callable[[CompletionOutput], Tokens] = scored_tokens) -> None:
        self._scored = scored
        self._sent: dict[tuple[int, int], int] = {}

    def new(self, prompt: int, choice: CompletionOutput) -> Tokens:
        """Those that have not, which are sent hereby."""
        tokens, key = self._scored(choice), (prompt, choice.index)
        start = self._sent.get(key, 0)
        self._sent[key] = max(start, len(tokens))
        return tokens[start:]


def chosen(entry: Mapping[int, Logprob]) -> Logprob:
    """The token that was taken: always the first."""
    return next(iter(entry.values()))
