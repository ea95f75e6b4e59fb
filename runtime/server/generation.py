"""The way of a generating request: read, check, admit, run, answer. The routes differ in how a
body becomes prompts and how results become JSON."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import orjson
from starlette.types import Receive, Scope, Send

from trtllm_lite.runtime.errors import EngineDeadError, RequestError
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.server.body import read_object
from trtllm_lite.runtime.server.convert import MAX_TOKENS, Ask, renamed, with_length_name
from trtllm_lite.runtime.server.errors import (
    ApiError,
    ClientGoneError,
    deadline_passed,
    from_exception,
)
from trtllm_lite.runtime.server.event_form import DATA_ONLY, EventForm
from trtllm_lite.runtime.server.exchange import KEEP_ALIVE, Exchange
from trtllm_lite.runtime.server.metrics import Metrics, Outcome
from trtllm_lite.runtime.server.replies import Reply, check_ended_well
from trtllm_lite.runtime.server.runs import Run
from trtllm_lite.runtime.server.service import Served, Service
from trtllm_lite.runtime.server.tracing import Operation, RequestTrace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """One checked request. `sequences`: what it counts for in the queue. `length_name`: the field
    that gave its max_tokens."""

    served: Served
    asks: Sequence[Ask]
    reply: Reply
    stream: bool
    length_name: str = MAX_TOKENS

    @property
    def sequences(self) -> int:
        return sum(ask.params.n for ask in self.asks)


class GenerationRoute(ABC):
    """An ASGI endpoint that answers with generated text."""

    operation: ClassVar[Operation] = "chat"
    renames: ClassVar[Mapping[str, str]] = {}
    """Names of fields in this route by the engine's names for them."""
    events: ClassVar[EventForm] = DATA_ONLY
    """How its streams are written."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @abstractmethod
    async def plan(self, raw: dict[str, Any]) -> Plan:
        """Check a body. Raises ApiError, RequestError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        exchange = Exchange(scope, receive, send, service.config.stall_seconds)
        with service.tracer.request(self.operation, scope) as trace:
            try:
                await self._answer(exchange, trace)
            except ClientGoneError:
                # Nobody is left to be answered.
                trace.abandoned()

    async def _answer(self, exchange: Exchange, trace: RequestTrace) -> None:
        service = self._service
        service.check_open()
        plan = await self._checked(exchange.scope, exchange.receive)
        trace.planned(plan.served.name, plan.asks[0].params, stream=plan.stream)
        service.check_open()
        with service.queue_of(plan.served).admitted(plan.sequences):
            serving = _Serving(service, exchange, plan, self, trace)
            await exchange.while_connected(serving.run())

    async def _checked(self, scope: Scope, receive: Receive) -> Plan:
        raw: dict[str, Any] = {}
        try:
            raw = await read_object(scope, receive, self._service.config.limits)
            return replace(await self.plan(raw), length_name=self.length_name(raw))
        except (ApiError, RequestError) as error:
            self._service.metrics.rejected("invalid")
            raise self.as_api_error(error, self.length_name(raw)) from None

    def length_name(self, raw: Mapping[str, Any]) -> str:
        """The field of a body that says how many tokens may be generated."""
        return MAX_TOKENS

    def as_api_error(self, error: Exception, length_name: str) -> ApiError:
        """What the client of this route is told."""
        told = from_exception(error)
        if isinstance(error, RequestError):
            told = with_length_name(told, length_name)
        return renamed(told, self.renames)


class _Account:
    """What becomes of one request: its outcome is counted once, if it was accepted."""

    def __init__(self, metrics: Metrics, model: str, trace: RequestTrace) -> None:
        self._metrics = metrics
        self._model = metrics.of(model)
        self._trace = trace
        self._open = False
        self._begun: set[int] = set()

    def accept(self) -> None:
        self._open = True
        self._model.accepted()

    def saw(self, prompt: int, output: RequestOutput) -> None:
        """A result: the first of a prompt that has a token counts, and the last."""
        if prompt not in self._begun and output.metrics.first_token_time is not None:
            self._begun.add(prompt)
            self._model.first_token(output.metrics)
        if output.finished:
            self._model.finished(output)
            self._trace.took(output)

    def end(self, outcome: Outcome) -> None:
        if self._open:
            self._open = False
            self._model.ended(outcome)

    def refuse(self, reason: str) -> None:
        """Only if it was never accepted."""
        if not self._open:
            self._metrics.rejected(reason)


class _Serving:
    """One admitted request, from the engine to the last byte."""

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        plan: Plan,
        route: GenerationRoute,
        trace: RequestTrace,
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._plan = plan
        self._route = route
        self._trace = trace
        self._account = _Account(service.metrics, plan.served.card.names[0], trace)
        self._finished: dict[int, RequestOutput] = {}

    async def run(self) -> None:
        """Answer. Raises ApiError while nothing has been sent; later errors are events."""
        limit = self._service.config.request_timeout
        try:
            async with asyncio.timeout(limit):
                await self._answer()
        except (asyncio.CancelledError, ClientGoneError):
            self._account.refuse("client_left")
            self._account.end("aborted")
            raise
        except TimeoutError:
            await self._fail(deadline_passed(limit))
        except Exception as error:
            await self._fail_with(error)

    async def _fail_with(self, error: Exception) -> None:
        if isinstance(error, EngineDeadError) and self._service.phase != "draining":
            self._service.die(str(error))
        told = self._route.as_api_error(error, self._plan.length_name)
        if told.status == 500 and not isinstance(error, ApiError):
            _log.error("a request failed", exc_info=error)
        await self._fail(told)

    async def _fail(self, error: ApiError) -> None:
        self._account.refuse("invalid" if error.status < 500 else "failed")
        self._account.end("failed")
        self._trace.failed(error)
        if not self._exchange.started:
            raise error
        await self._exchange.write(self._events(self._plan.reply.failure(error)), last=True)

    async def _answer(self) -> None:
        plan = self._plan
        async with Run(plan.served.llm, plan.asks, final_only=not plan.stream) as run:
            await run.start()
            self._account.accept()
            if plan.stream:
                await self._stream(run)
            else:
                await self._whole(run)

    async def _whole(self, run: Run) -> None:
        async with aclosing(run.results(self._service.config.request_timeout)) as results:
            async for item in results:
                if item is not None:
                    self._take(*item)
        outputs = [self._finished[i] for i in range(len(self._plan.asks))]
        body = orjson.dumps(self._plan.reply.whole(outputs))
        self._account.end("finished")
        await self._exchange.reply(body)

    async def _stream(self, run: Run) -> None:
        """The status is not sent before there is a first result, or a silence worth a sign."""
        exchange, reply = self._exchange, self._plan.reply
        async with aclosing(run.results(self._service.config.keep_alive_seconds)) as results:
            async for item in results:
                chunks: list[dict[str, Any]] = []
                if item is not None:
                    self._take(*item)
                    chunks = reply.chunks(*item)
                if not exchange.started:
                    await exchange.start_events()
                    chunks = [*reply.opening(), *chunks]
                if chunks or item is None:
                    await exchange.write(self._events(chunks) if chunks else KEEP_ALIVE)
        self._account.end("finished")
        end = self._events(reply.closing()) + self._route.events.end
        await exchange.write(end, last=True)

    def _take(self, prompt: int, output: RequestOutput) -> None:
        self._account.saw(prompt, output)
        if output.finished:
            self._finished[prompt] = output
        check_ended_well(output)

    def _events(self, parts: Iterable[dict[str, Any]]) -> bytes:
        return self._route.events.frames(parts)
