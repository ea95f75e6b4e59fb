"""The engine's side of one HTTP request: a stream for each of its prompts."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

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
        queue: asyncio.Queue[Item | Exception] = asyncio.Queue(maxsize=1)
        pumps = [asyncio.ensure_future(_pump(i, s, queue)) for i, s in enumerate(self._streams)]
        left = len(pumps)
        try:
            while left:
                item = await _next(queue, beat)
                if isinstance(item, Exception):
                    raise item
                left -= item is not None and item[1].finished
                yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

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
            final_only=self._final_only,
            **options.template,
        )


async def _pump(index: int, stream: RequestStream, queue: asyncio.Queue[Item | Exception]) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
    except Exception as error:
        await queue.put(error)


async def _next(queue: asyncio.Queue[Item | Exception], beat: float) -> Item | Exception | None:
    try:
        async with asyncio.timeout(beat):
            return await queue.get()
    except TimeoutError:
        return None
