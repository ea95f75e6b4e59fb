"""From token events to results: text, stop strings, logprobs and times.

It knows nothing of slots or steps. The engine finds end tokens and lengths, stop strings are found
here, and whoever drives both tells the engine (`Processed.stops`).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from trtllm_lite.runtime.detokenize import Detokenizer, LateDetokenizer
from trtllm_lite.runtime.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenEvent,
)
from trtllm_lite.runtime.request import FinishReason, Request
from trtllm_lite.runtime.tokenizer import Tokenizer

RawLogprobs = Mapping[int, tuple[float, int]]


@dataclass(frozen=True)
class Stop:
    """A choice whose stop string is complete: for `Engine.stop`."""

    request_id: str
    index: int
    stop_reason: str


@dataclass(frozen=True)
class Processed:
    """What came of some events: at most one result a request, and the choices to stop."""

    outputs: tuple[RequestOutput, ...]
    stops: tuple[Stop, ...]


class OutputProcessor:
    """Owns the text state of every unfinished request. Without a tokenizer all text is empty.

    A request is added before its first event and forgotten with its last; events of requests that
    it does not know, or of choices that have ended, change nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, _RequestState] = {}

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended, oldest first."""
        return tuple(self._requests)

    def add(self, request: Request, prompt: str | None, *, final_only: bool = False) -> None:
        """Expect events of `request`. `final_only`: one result, when all of it is done."""
        self._requests[request.id] = _RequestState(request, prompt, self._tokenizer, final_only)

    def forget(self, request_id: str) -> None:
        """Drop a request without a result. Unknown ids are no error."""
        self._requests.pop(request_id, None)

    def process(self, events: Iterable[TokenEvent]) -> Processed:
        """Take events in order; each request that they concern gives a result of its new state."""
        now, stops = self._clock(), []
        touched: dict[str, _RequestState] = {}
        for event in events:
            state = self._requests.get(event.request_id)
            if state is None:
                continue
            touched[event.request_id] = state
            stop = state.take(event, now)
            if stop is not None:
                stops.append(Stop(event.request_id, event.index, stop))
            if state.finished:
                del self._requests[event.request_id]
        outputs = [s.result() for s in touched.values() if s.finished or not s.final_only]
        return Processed(tuple(outputs), tuple(stops))


class _RequestState:
    """One request on its way: its choices, its times, and what came with its first token."""

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, final_only: bool
    ) -> None:
        self.final_only = final_only
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._choices = [
            _Choice(request, i, tokenizer, _detokenizer(request, tokenizer, final_only))
            for i in range(request.params.n)
        ]
        self._cached_tokens: int | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._finished: float | None = None

    @property
    def finished(self) -> bool:
        return self._finished is not None

    def take(self, event: TokenEvent, now: float) -> str | None:
        """Returns the stop string that this event completes, when the engine does not know yet
        that the choice is over."""
        choice = self._choices[event.index]
        if choice.finish_reason is None:
            choice.take(event)
        self._note(event, now)
        if choice.finish_reason is None:
            return None
        if all(c.finish_reason is not None for c in self._choices):
            self._finished = now
        return choice.stop_string if event.finish_reason is None else None

    def result(self) -> RequestOutput:
        """The state now; deltas start anew."""
        return RequestOutput(
            request_id=self._request.id,
            prompt=self._prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=[choice.result() for choice in self._choices],
            finished=self.finished,
            metrics=self._metrics(),
            cached_tokens=self._cached_tokens or 0,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _note(self, event: TokenEvent, now: float) -> None:
        if self._scheduled is None:
            self._scheduled = event.first_scheduled_time
        if event.token_id is not None and self._first_token is None:
            self._first_token = now
        if event.token_id is not None and event.index == 0 and self._cached_tokens is None:
            self._cached_tokens = event.cached_tokens
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if raw is None else decode_logprobs(raw, self._tokenizer)
                for raw in event.prompt_logprobs
            ]

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self._request.arrival_time,
            first_scheduled_time=self._scheduled,
            first_token_time=self._first_token,
            finished_time=self._finished,
            num_generation_tokens=max(len(c.token_ids) for c in self._choices),
            num_draft_tokens=sum(c.draft_tokens for c in self._choices),
            num_accepted_tokens=sum(c.accepted_tokens for c in self._choices),
        )


class _Choice:
    """One choice on its way."""

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        text: Detokenizer | LateDetokenizer | None,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        self.draft_tokens = self.accepted_tokens = 0
        self._index = index
        self._tokenizer = tokenizer
        self._text = text
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._cumulative: float | None = None
        if request.params.logprobs is not None:
            self._logprobs, self._cumulative = [], 0.0
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._delta = ""

    def take(self, event: TokenEvent) -> None:
        self.draft_tokens, self.accepted_tokens = event.draft_tokens, event.accepted_tokens
        if event.token_id is not None:
            self._take_token(event.token_id, event)
        if self.finish_reason is None and event.finish_reason is not None:
            self._end(event.finish_reason, event.stop_reason, event.error)

    def result(self) -> CompletionOutput:
        delta, self._delta = self._delta, ""
        return CompletionOutput(
            index=self._index,
            text=self._text.text if self._text is not None else "",
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=self._cumulative,
            delta=delta,
            error=self._error,
        )

    def _take_token(self, token_id: int, event: TokenEvent) -> None:
        self.token_ids.append(token_id)
        if self._logprobs is not None and event.logprobs is not None:
            self._logprobs.append(decode_logprobs(event.logprobs, self._tokenizer))
            self._cumulative = (self._cumulative or 0.0) + event.logprobs[token_id][0]
        # A token that ends the sequence is one of its tokens but not of its text.
        if self._text is None or event.finish_reason == "stop":
            return
        self._delta += self._text.append(token_id)
        self._check_stop_string()

    def _end(self, reason: FinishReason, stop_reason: int | str | None, error: str | None) -> None:
        self.finish_reason, self._stop_reason, self._error = reason, stop_reason, error
        if self._text is not None:
            self._delta += self._text.flush()
            if reason in ("stop", "length"):
                self._check_stop_string()

    def _check_stop_string(self) -> None:
        """A complete stop string comes before whatever else would end the choice here."""
        if self._text is not None and self._text.stop_reason is not None:
            self.finish_reason = "stop"
            self.stop_string = self._stop_reason = self._text.stop_reason


def _detokenizer(
    request: Request, tokenizer: Tokenizer | None, final_only: bool
) -> Detokenizer | LateDetokenizer | None:
    """Without stop strings and readers on the way, text can wait for the end."""
    if tokenizer is None:
        return None
    if final_only and not request.params.stops:
        return LateDetokenizer(tokenizer, request.params)
    return Detokenizer(tokenizer, request.params)


def decode_logprobs(raw: RawLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Logprobs with the text of their tokens, in the same order."""
    return {
        token: Logprob(value, rank, "" if tokenizer is None else tokenizer.token_text(token))
        for token, (value, rank) in raw.items()
    }
