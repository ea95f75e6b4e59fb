"""`AsyncLLM` over the fake session: streams, aborts, and the ends of things."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import F32, FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import EngineDeadError, RequestError
from trtllm_lite.runtime.loading import Parts
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.request_stream import RequestStream
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer

T = TypeVar("T")

VOCAB = 64
CONFIG = EngineConfig(
    max_num_seqs=3,
    max_model_len=64,
    max_num_batched_tokens=16,
    max_kv_tokens=110,
    block_size=4,
    check_invariants=True,
)
OPTIONS = SessionOptions(CONFIG.max_num_seqs, CONFIG.capacity)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
LONG = replace(GREEDY, max_tokens=50, ignore_eos=True)


class RecordingTokenizer(Tokenizer):
    """One token a byte, of which there are 63; notes the threads that encode."""

    def __init__(self) -> None:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,é😀"
        pieces = level.pre_tokenize_str(letters)
        alphabet = sorted({c for piece, _ in pieces for c in piece})[: VOCAB - 1]
        vocab = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
        raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer, raw.decoder = level, decoders.ByteLevel()
        raw.add_special_tokens(["<eos>"])
        super().__init__(raw, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
        self.threads: set[int] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens=add_special_tokens)


class GatedSession(FakeSession):
    """A session whose runs wait for a permit each; `entered` tells that one has begun."""

    def __init__(self) -> None:
        super().__init__(OPTIONS, vocab_size=VOCAB)
        self.permits, self.entered = threading.Semaphore(0), threading.Event()
        self.broken = False

    def run(self, batch: Batch) -> F32:
        self.entered.set()
        self.permits.acquire()
        if self.broken:
            raise SystemExit("out of order")  # nothing that a step isolates
        return super().run(batch)


def make_parts(session: FakeSession | None = None) -> Parts:
    session = session or FakeSession(OPTIONS, vocab_size=VOCAB)
    engine = Engine(session, CONFIG, vocab_size=VOCAB, eos_token_ids=(0,))
    return Parts(engine, CONFIG, RecordingTokenizer(), GREEDY)


def run(
    test: Callable[[AsyncLLM], Coroutine[Any, Any, None]], session: FakeSession | None = None
) -> None:
    async def main() -> None:
        async with AsyncLLM.from_parts(make_parts(session)) as llm:
            await test(llm)

    asyncio.run(main())
    assert not any(t.name == "trtllm-lite-engine" for t in threading.enumerate())


def test_streamed_text_adds_up_to_the_generated_one() -> None:
    async def test(llm: AsyncLLM) -> None:
        whole = await llm.generate("what is this", GREEDY)
        stream = await llm.submit("what is this", GREEDY, request_id="mine")
        results = await read(stream)
        assert results[0].request_id == stream.request_id == "mine"
        assert "".join(r.outputs[0].delta for r in results) == whole.outputs[0].text
        assert replace(results[-1].outputs[0], delta="") == replace(whole.outputs[0], delta="")
        assert whole.outputs[0].delta == whole.outputs[0].text
        assert await read(stream) == []
        answer = await llm.generate(messages=[{"role": "user", "content": "hi"}])
        assert answer.prompt == "hi"
        assert llm.default_params() == GREEDY

    run(test)


def test_a_slow_reader_gets_one_merged_result() -> None:
    async def test(llm: AsyncLLM) -> None:
        whole = await llm.generate("slow", LONG)
        stream = await llm.submit("slow", LONG)
        while (await llm.stats()).finished.get("length", 0) < 2:
            await asyncio.sleep(0.001)
        results = await read(stream)
        assert len(results) == 1
        assert results[0].outputs[0].delta == whole.outputs[0].text

    run(test)


def test_tokenizing_keeps_off_the_event_loop() -> None:
    async def test(llm: AsyncLLM) -> None:
        await llm.generate("some text")
        tokenizer = llm.tokenizer
        assert isinstance(tokenizer, RecordingTokenizer)
        assert tokenizer.threads
        assert threading.get_ident() not in tokenizer.threads

    run(test)


def test_a_bad_request_is_refused_when_submitted() -> None:
    async def test(llm: AsyncLLM) -> None:
        bad: list[dict[str, Any]] = [
            {"prompt": "x" * 70},
            {"prompt": "a", "prompt_token_ids": [1]},
            {"prompt_token_ids": [VOCAB]},
            {"prompt_token_ids": []},
            {"prompt": "a", "tools": []},
            {},
        ]
        for arguments in bad:
            with pytest.raises(RequestError):
                await llm.submit(**arguments)
            with pytest.raises(RequestError):
                await llm.generate(**arguments)
        assert (await llm.stats()).steps == 0

    run(test)


async def read(stream: RequestStream) -> list[RequestOutput]:
    return [result async for result in stream]


async def first_result(llm: AsyncLLM, session: GatedSession) -> tuple[RequestStream, RequestOutput]:
    stream = await llm.submit("hello", LONG, request_id="r")
    session.permits.release()
    return stream, await anext(stream)


async def stepping(session: GatedSession, work: Coroutine[Any, Any, T]) -> T:
    """Let the engine take steps until the work is done."""
    task = asyncio.ensure_future(work)
    while not task.done():
        session.permits.release()
        await asyncio.sleep(0.001)
    return await task


@pytest.mark.parametrize("how", ["id", "stream"])
def test_an_aborted_request_gives_a_last_result(how: str) -> None:
    session = GatedSession()

    async def test(llm: AsyncLLM) -> None:
        stream, first = await first_result(llm, session)
        with pytest.raises(RequestError, match="in use"):
            await stepping(session, llm.submit("other", request_id="r"))
        await stepping(session, llm.abort("r") if how == "id" else stream.abort())
        stats = await llm.stats()
        assert (stats.running, stats.slots_used) == (0, 0)
        *_, last = await read(stream)
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert last.outputs[0].text.startswith(first.outputs[0].text)
        await stream.abort()
        await llm.abort("unknown")

    run(test, session)


@pytest.mark.parametrize("how", ["cancel", "break", "with", "timeout", "generate"])
def test_a_reader_that_leaves_ends_its_request(how: str) -> None:
    session = GatedSession()

    kept: list[RequestStream] = []

    async def leave(llm: AsyncLLM) -> None:
        if how == "generate":
            task = asyncio.ensure_future(llm.generate("hello", LONG))
            while not session.entered.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return
        stream, _ = await first_result(llm, session)
        if how != "break":
            kept.append(stream)
        if how == "cancel":
            reader = asyncio.ensure_future(read(stream))
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.001)
        elif how == "with":
            async with stream:
                pass

    async def test(llm: AsyncLLM) -> None:
        await leave(llm)
        gc.collect()
        session.permits.release(100)
        stats = await llm.stats()
        assert (stats.running, stats.waiting, stats.slots_used) == (0, 0, 0)
        assert stats.finished == {"abort": 1}

    run(test, session)


def test_closing_ends_what_runs_with_abort_and_refuses_more() -> None:
    session = GatedSession()

    async def main() -> None:
        llm = AsyncLLM.from_parts(make_parts(session))
        streams = [await stepping(session, llm.submit("hello", LONG)) for _ in range(2)]
        threading.Timer(0.01, lambda: session.permits.release(100)).start()
        await llm.close()
        await llm.close()
        for stream in streams:
            *_, last = await read(stream)
            assert last.outputs[0].finish_reason == "abort"
        for call in (llm.submit("a"), llm.generate("a"), llm.stats(), llm.abort("a")):
            with pytest.raises(EngineDeadError, match="closed"):
                await call

    asyncio.run(main())


def test_a_death_of_the_engine_reaches_every_stream_and_every_later_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = GatedSession()

    async def test(llm: AsyncLLM) -> None:
        streams = [await stepping(session, llm.submit("hello", LONG)) for _ in range(3)]
        session.broken = True
        session.permits.release()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="out of order"):
                await read(stream)
        for call in (llm.submit("a"), llm.generate("a"), llm.stats()):
            with pytest.raises(EngineDeadError, match="out of order"):
                await call

    run(test, session)
    assert "the engine thread died" in caplog.text


def test_a_failing_step_is_a_result_and_the_engine_goes_on() -> None:
    session = FakeSession(OPTIONS, vocab_size=VOCAB)

    async def test(llm: AsyncLLM) -> None:
        session.fail_next(1, RuntimeError("no memory left"))
        failed = await llm.generate("hello", GREEDY)
        assert failed.outputs[0].finish_reason == "error"
        assert "no memory left" in (failed.outputs[0].error or "")
        assert (await llm.generate("hello", GREEDY)).outputs[0].error is None

    run(test, session)


def test_a_loop_that_is_gone_ends_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    session = GatedSession()
    llm = AsyncLLM.from_parts(make_parts(session))
    kept: list[RequestStream] = []

    async def leave() -> None:
        kept.append(await llm.submit("hello", LONG))

    async def look() -> None:
        stats = await llm.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert (await llm.generate("hello", GREEDY)).finished
        await llm.close()

    asyncio.run(leave())
    session.permits.release(1000)
    while "lost its reader" not in caplog.text:
        time.sleep(0.001)
    asyncio.run(look())


def test_an_idle_engine_sleeps() -> None:
    looks: list[int] = []

    class Watched(Engine):
        @property
        def has_unfinished(self) -> bool:
            looks.append(1)
            return super().has_unfinished

    session = FakeSession(OPTIONS, vocab_size=VOCAB)
    engine = Watched(session, CONFIG, vocab_size=VOCAB, eos_token_ids=(0,))

    async def main() -> None:
        parts = replace(make_parts(), engine=engine)
        async with AsyncLLM.from_parts(parts) as llm:
            await llm.generate("hello", GREEDY)
            await llm.stats()
            await asyncio.sleep(0.01)
            before = len(looks)
            await asyncio.sleep(0.05)
            assert len(looks) == before

    asyncio.run(main())
