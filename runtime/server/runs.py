"""The engine's side of one HTTP request: a stream for each of its prompts."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import ContextLengthError
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.request_stream import RequestStream
from trtllm_lite.runtime.server.convert import Ask

Item = tuple[int, RequestOutput]


class Run:
    """Runs prompts together. `final_only`: each gives one result, when it is done.

    Leaving it as a context manager ends what has not ended.
    """

    def __init__(self, llm: AsyncLLM, asks: Sequence[Ask], *, final_only: bool) -> None:
        self._llm = llm
        self._asks = asks
        self._final_only = final_only
        self._streams: list[RequestStream] = []

    async def start(self) -> None:
        """Hand all prompts to the engine, or none. Raises RequestError for one that can never be
        served, EngineDeadError."""
        made = await asyncio.gather(*map(self._submit, self._asks), return_exceptions=True)
        self._streams = [stream for stream in made if isinstance(stream, RequestStream)]
        for failure in made:
            if isinstance(failure, BaseException):
                raise failure

    async def results(self, beat: float) -> AsyncGenerator[Item | None, None]:
        """Growing results with the index of their prompt, until all are finished; None whenever
        there was none for `beat` seconds. Raises EngineDeadError.

        A reader that is slow holds up nobody: what it does not take is merged.
        """
        arrivals, left = _Arrivals(self._streams, beat), len(self._streams)
        try:
            while left:
                index = await arrivals.next()
                output = None if index is None else self._streams[index].take()
                if index is not None and output is not None:
                    left -= output.finished
                    yield index, output
                elif index is None:
                    yield None
        finally:
            arrivals.close()

    async def __aenter__(self) -> "Run":
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            async with stream:
                pass

    async def _submit(self, ask: Ask) -> RequestStream:
        try:
            return await self._submit_as_is(ask)
        except ContextLengthError as error:
            if not ask.optional_length or error.param != "max_tokens":
                raise
        return await self._submit_as_is(replace(ask, params=replace(ask.params, max_tokens=None)))

    async def _submit_as_is(self, ask: Ask) -> RequestStream:
        source, options = ask.source, ask.options
        ids = source.prompt_token_ids
        return await self._llm.submit(
            source.prompt,
            ask.params,
            messages=source.messages,
            prompt_token_ids=None if ids is None else list(ids),
            tools=options.tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            final_only=self._final_only,
            **options.template,
        )


class _Arrivals:
    """Which streams have something to take, first come, first served; and a sign of silence when
    there was nothing for `beat` seconds. There is one timer, however fast results come."""

    def __init__(self, streams: Sequence[RequestStream], beat: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat = beat
        self._ready: deque[int] = deque()
        self._some = asyncio.Event()
        self._silent = False
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(beat, self._listen)
        for index, stream in enumerate(streams):
            stream.on_arrival(partial(self._arrived, index))

    async def next(self) -> int | None:
        """The index of a stream that may have a result; None for silence."""
        while not self._ready:
            if self._silent:
                self._silent = False
                return None
            self._some.clear()
            await self._some.wait()
        self._silent = False
        self._heard = self._loop.time()
        return self._ready.popleft()

    def close(self) -> None:
        """End the timer."""
        self._timer.cancel()

    def _arrived(self, index: int) -> None:
        self._ready.append(index)
        self._some.set()

    def _listen(self) -> None:
        now = self._loop.time()
        if now >= self._heard + self._beat:
            self._silent, self._heard = True, now
            self._some.set()
        self._timer = self._loop.call_at(self._heard + self._beat, self._listen)
