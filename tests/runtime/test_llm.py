"""`LLM` over the fake session: every answer is compared with one computed from nothing."""

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import F32, FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import ContextLengthError, EngineDeadError, RequestError
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.loading import Parts
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.result_stream import ResultStream
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer

CONFIG = EngineConfig(
    max_num_seqs=3,
    max_model_len=80,
    max_num_batched_tokens=16,
    max_kv_tokens=240,
    block_size=4,
    check_invariants=True,
)
OPTIONS = SessionOptions(CONFIG.max_num_seqs, CONFIG.capacity)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = "<bos>{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{{ x }}"


def make_tokenizer() -> Tokenizer:
    """One token a byte: printable ASCII, and the bytes of two longer characters."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = level.pre_tokenize_str("".join(map(chr, range(32, 127))) + "\n é 😀")
    alphabet = sorted({c for piece, _ in pieces for c in piece})
    vocab = {"<eos>": 0, "<bos>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = level, decoders.ByteLevel()
    raw.add_special_tokens(["<eos>", "<bos>"])
    return Tokenizer(raw, bos_token_id=1, eos_token_ids=[0], chat_template=TEMPLATE)


TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.vocab_size


class GatedSession(FakeSession):
    """A session whose runs wait for a permit each; `entered` tells that one has begun."""

    def __init__(self) -> None:
        super().__init__(OPTIONS, vocab_size=VOCAB)
        self.permits, self.entered = threading.Semaphore(0), threading.Event()

    def run(self, batch: Batch) -> F32:
        self.entered.set()
        self.permits.acquire()
        return super().run(batch)

    def let_go(self) -> None:
        self.permits.release(1000)


def open_llm(session: FakeSession | None = None, config: EngineConfig = CONFIG) -> LLM:
    session = session or FakeSession(OPTIONS, vocab_size=VOCAB)
    engine = Engine(session, config, vocab_size=VOCAB, eos_token_ids=(0,))
    return LLM.from_parts(Parts(engine, config, TOKENIZER, replace(GREEDY, max_tokens=5)))


def expected(prompt: Sequence[int], count: int = 12) -> tuple[int, ...]:
    """Greedy tokens of a prompt computed from nothing, up to the end token."""
    session, tokens = FakeSession(OPTIONS, vocab_size=VOCAB), list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1:] != [0]:
        tokens.append(int(session.reference(tokens).argmax()))
    return tuple(tokens[len(prompt) :])


def check(result: RequestOutput, prompt: Sequence[int], count: int = 12) -> None:
    (choice,) = result.outputs
    tokens = expected(prompt, count)
    assert choice.token_ids == tokens
    ended = tokens[-1] == 0
    assert choice.text == TOKENIZER.decode(tokens[:-1] if ended else tokens)
    assert choice.finish_reason == ("stop" if ended else "length")
    assert result.finished


def test_results_come_in_the_order_of_the_prompts() -> None:
    texts = ["hello there", "a", "why is the sky blue? because", "x y z", "hello there"]
    with open_llm() as llm:
        results = llm.generate(texts, GREEDY)
    for text, result in zip(texts, results, strict=True):
        assert result.prompt == text
        check(result, TOKENIZER.encode(text))


def test_one_prompt_and_token_ids_in_any_form() -> None:
    with open_llm() as llm:
        (text,) = llm.generate("abc", GREEDY)
        (ids,) = llm.generate(params=GREEDY, prompt_token_ids=[5, 6, 7])
        two = llm.generate(
            params=[GREEDY, replace(GREEDY, max_tokens=2)], prompt_token_ids=[[5], [6]]
        )
        assert llm.generate([]) == []
    check(text, TOKENIZER.encode("abc"))
    check(ids, [5, 6, 7])
    assert ids.prompt is None
    check(two[0], [5])
    check(two[1], [6], count=2)


def test_defaults_are_used_without_parameters() -> None:
    with open_llm() as llm:
        assert llm.default_params() == replace(GREEDY, max_tokens=5)
        (result,) = llm.generate("abc")
        (answer,) = llm.chat(HELLO)
    check(result, TOKENIZER.encode("abc"), count=5)
    prompt = TOKENIZER.encode("<bos>u:hi\n", add_special_tokens=False)
    check(answer, prompt, count=CONFIG.max_model_len - len(prompt))


def test_chat_takes_one_conversation_or_several() -> None:
    other = [{"role": "user", "content": "yo"}, {"role": "assistant", "content": "so"}]
    with open_llm() as llm:
        (one,) = llm.chat(HELLO, GREEDY, x="!")
        first, second = llm.chat([HELLO, other], GREEDY)
        with pytest.raises(RequestError, match="messages"):
            llm.chat([])
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        (more,) = llm.chat(other, GREEDY, **options)
        *_, streamed = llm.stream(None, GREEDY, messages=other, **options)
    assert (more.prompt, streamed.prompt) == ("<bos>u:yo\na:so", "<bos>u:yo\na:so")
    assert one.prompt == "<bos>u:hi\n!"
    assert [first.prompt, second.prompt] == ["<bos>u:hi\n", "<bos>u:yo\na:so\n"]
    for result in (one, first, second, more, streamed):
        check(result, TOKENIZER.encode(result.prompt or "", add_special_tokens=False))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda llm: llm.generate(["ok", "x" * 80], GREEDY), ContextLengthError),
        (lambda llm: llm.generate(["ok", 3], GREEDY), RequestError),
        (lambda llm: llm.generate(["ok", ""], GREEDY), RequestError),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), RequestError),
        (lambda llm: llm.generate(), RequestError),
        (lambda llm: llm.generate("a", prompt_token_ids=[1]), RequestError),
        (lambda llm: llm.generate(prompt_token_ids=[[1], [VOCAB]]), RequestError),
        (lambda llm: llm.generate(prompt_token_ids=[[1], 2]), RequestError),
        (lambda llm: llm.chat([HELLO, [{"role": "user"}]]), RequestError),
        (lambda llm: llm.stream("a", messages=HELLO), RequestError),
        (lambda llm: llm.stream("x" * 80), ContextLengthError),
        (lambda llm: llm.stream("a", tools=[{}]), RequestError),
    ],
)
def test_a_bad_request_refuses_the_whole_call_before_any_work(
    call: Callable[[LLM], Any], error: type[Exception]
) -> None:
    with open_llm() as llm:
        with pytest.raises(error):
            call(llm)
        stats = llm.stats()
        assert (stats.waiting, stats.running, stats.steps) == (0, 0, 0)
        check(llm.generate("abc", GREEDY)[0], TOKENIZER.encode("abc"))


def test_a_failing_step_ends_its_own_requests_only() -> None:
    session = FakeSession(OPTIONS, vocab_size=VOCAB)
    prompts = [[9] * 16, [8] * 16]  # each fills the budget of a step
    with open_llm(session) as llm:
        session.fail_next(1, RuntimeError("no memory\nleft"))
        first, second = llm.generate(params=GREEDY, prompt_token_ids=prompts)
        assert first.outputs[0].finish_reason == "error"
        assert "no memory left" in (first.outputs[0].error or "")
        check(second, prompts[1])
        check(llm.generate(params=GREEDY, prompt_token_ids=prompts[0])[0], prompts[0])


def test_streamed_text_adds_up_to_the_generated_one() -> None:
    with open_llm() as llm:
        for text in ("hello", "what then", "é😀"):
            (whole,) = llm.generate(text, GREEDY)
            results = list(llm.stream(text, GREEDY))
            assert "".join(r.outputs[0].delta for r in results) == whole.outputs[0].text
            assert results[-1].outputs[0].token_ids == whole.outputs[0].token_ids
            assert [r.finished for r in results] == [False] * (len(results) - 1) + [True]
            check(results[-1], TOKENIZER.encode(text))
        assert list(llm.stream(messages=HELLO, x="!"))[-1].prompt == "<bos>u:hi\n!"
        assert list(llm.stream(prompt_token_ids=[5, 6]))[-1].prompt_token_ids == (5, 6)


def test_a_stop_string_over_token_borders_frees_the_slot() -> None:
    with open_llm() as llm:
        (whole,) = llm.generate("hello", replace(GREEDY, max_tokens=40, ignore_eos=True))
        text = whole.outputs[0].text
        stop = text[3:7]
        (cut,) = llm.generate("hello", replace(GREEDY, max_tokens=40, ignore_eos=True, stop=stop))
        assert cut.outputs[0].text == text[: text.index(stop)]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
        assert len(cut.outputs[0].token_ids) < len(whole.outputs[0].token_ids)
        stats = llm.stats()
        assert (stats.running, stats.slots_used, stats.finished["stop"]) == (0, 0, 1)


@pytest.mark.parametrize("leave", ["close", "break", "with"])
def test_leaving_a_stream_ends_its_request(leave: str) -> None:
    session = GatedSession()
    with open_llm(session) as llm:
        stream = llm.stream("hello", GREEDY)
        session.permits.release()
        if leave == "close":
            next(stream)
            stream.close()
            assert list(stream) == []
        elif leave == "with":
            with stream as entered:
                next(entered)
        else:
            for _ in stream:
                break
            del stream
        session.let_go()
        stats = llm.stats()
    assert (stats.running, stats.waiting, stats.slots_used) == (0, 0, 0)
    assert stats.finished == {"abort": 1}


def test_choices_have_their_own_streams_and_logprobs() -> None:
    params = SamplingParams(
        n=3, seed=5, max_tokens=10, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    with open_llm() as llm:
        (result,) = llm.generate("hello", params)
        (again,) = llm.generate("hello", params)
    assert [c.index for c in result.outputs] == [0, 1, 2]
    assert len({c.token_ids for c in result.outputs}) == 3
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in result.outputs]
    for choice in result.outputs:
        assert choice.logprobs is not None
        chosen = list(zip(choice.token_ids, choice.logprobs, strict=True))
        total = sum(entry[token].logprob for token, entry in chosen)
        assert choice.cumulative_logprob == pytest.approx(total)
        assert all(entry[t].decoded_token == TOKENIZER.token_text(t) for t, entry in chosen)
        assert all(2 <= len(entry) <= 3 for _, entry in chosen)
    assert result.prompt_logprobs is not None
    assert [x is None for x in result.prompt_logprobs] == [True] + [False] * 4


def test_cached_prefixes_and_times_are_reported() -> None:
    with open_llm() as llm:
        (first,) = llm.generate("a long enough prompt", GREEDY)
        (second,) = llm.generate("a long enough prompt", GREEDY)
    assert first.cached_tokens == 0
    assert second.cached_tokens == (len(second.prompt_token_ids) - 1) // 4 * 4
    assert second.outputs == first.outputs
    metrics = second.metrics
    assert metrics.first_scheduled_time is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
    assert sorted(times) == times
    assert metrics.first_token_time <= metrics.finished_time
    assert metrics.num_generation_tokens == len(second.outputs[0].token_ids)


def test_threads_may_share_an_llm() -> None:
    texts = [f"prompt {i}" * (i % 3 + 1) for i in range(8)]
    results: dict[str, RequestOutput] = {}
    with open_llm() as llm:

        def work(text: str) -> None:
            (results[text],) = llm.generate(text, GREEDY)

        threads = [threading.Thread(target=work, args=[text]) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for text in texts:
        check(results[text], TOKENIZER.encode(text))


@pytest.mark.skipif(os.name == "nt", reason="signals are delivered otherwise")
@pytest.mark.parametrize("streamed", [False, True])
def test_ctrl_c_while_waiting_ends_the_requests_and_leaves_the_llm_usable(streamed: bool) -> None:
    session = GatedSession()
    main = threading.main_thread().ident or 0

    def interrupt() -> None:
        session.entered.wait()
        signal.pthread_kill(main, signal.SIGINT)

    kept: list[ResultStream] = []

    def ask(llm: LLM) -> None:
        if not streamed:
            llm.generate(["hello", "you"] * 3, GREEDY)
        kept.append(llm.stream("hello"))
        list(kept[0])

    with open_llm(session) as llm:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            ask(llm)
        session.let_go()
        stats = llm.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        check(llm.generate("abc", GREEDY)[0], TOKENIZER.encode("abc"))


@pytest.mark.skipif(os.name == "nt", reason="signals are delivered otherwise")
def test_ctrl_c_at_any_moment_leaves_no_lock_held() -> None:
    """Between any two instructions of the waiting thread: a lock left behind is a hang here."""
    rng, main = random.Random(0), threading.main_thread().ident or 0
    interrupted = 0
    with open_llm() as llm:
        for _ in range(60):
            kick = threading.Timer(rng.random() * 0.005, signal.pthread_kill, [main, signal.SIGINT])
            try:
                kick.start()
                while not kick.finished.is_set():
                    llm.generate(["hello", "you"], GREEDY)
                kick.join()
            except KeyboardInterrupt:
                interrupted += 1
            stats = llm.stats()
            assert (stats.running, stats.waiting) == (0, 0)
        check(llm.generate("abc", GREEDY)[0], TOKENIZER.encode("abc"))
    assert interrupted == 60


def test_closing_ends_running_calls_and_refuses_later_ones() -> None:
    session = GatedSession()
    llm = open_llm(session)

    def close() -> None:
        session.entered.wait()
        threading.Timer(0.01, session.let_go).start()
        llm.close()

    threading.Thread(target=close).start()
    results = llm.generate(["hello", "you"], replace(GREEDY, max_tokens=60, ignore_eos=True))
    assert {r.outputs[0].finish_reason for r in results} == {"abort"}
    llm.close()
    for call in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: llm.stats()):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


def test_a_dropped_llm_ends_its_thread() -> None:
    llm = open_llm()
    check(llm.generate("abc", GREEDY)[0], TOKENIZER.encode("abc"))
    del llm
    gc.collect()
    assert not any(t.name == "trtllm-lite-engine" for t in threading.enumerate())
