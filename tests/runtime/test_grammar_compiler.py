"""The compiler in front of the compiler: each grammar once, in bounded time, never an accident."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from trtllm_lite.runtime import grammar_compiler
from trtllm_lite.runtime.errors import BusyError, MissingExtraError, RequestError
from trtllm_lite.runtime.grammar import Grammar, GrammarState
from trtllm_lite.runtime.grammar_compiler import CachedCompiler, GrammarLimits, open_llguidance
from trtllm_lite.runtime.grammar_spec import GrammarSpec


class Panic(BaseException):
    """As native code panics."""


class Compiled:
    def __init__(self) -> None:
        self.usable = True

    def start(self) -> GrammarState:
        raise NotImplementedError

    def is_special(self, token_id: int) -> bool:
        raise NotImplementedError


class Compiler:
    """Notes what it compiles and on which thread; `work` is what it does for a pattern."""

    def __init__(self, work: Callable[[str], None] | None = None) -> None:
        self.texts: list[str] = []
        self.threads: set[int] = set()
        self._work = work

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.texts.append(spec.text)
        self.threads.add(threading.get_ident())
        if self._work is not None:
            self._work(spec.text)
        return Compiled()


def regex(text: str, param: str = "grammar") -> GrammarSpec:
    return GrammarSpec.regex(text, param=param)


@contextmanager
def held(gate: threading.Event) -> Iterator[None]:
    """Whatever waits for the gate goes on at the end."""
    try:
        yield
    finally:
        gate.set()


def test_the_same_description_is_compiled_once_and_on_another_thread() -> None:
    inner = Compiler()
    compiler = CachedCompiler(lambda: inner)
    first = compiler.compile(regex("a", "one"))
    assert compiler.compile(regex("a", "other")) is first
    assert compiler.compile(regex("b")) is not first
    assert inner.texts == ["a", "b"]
    assert threading.get_ident() not in inner.threads


def test_the_inner_compiler_is_made_once_and_not_before_it_is_needed() -> None:
    made: list[Compiler] = []

    def make() -> Compiler:
        made.append(Compiler())
        return made[-1]

    compiler = CachedCompiler(make)
    assert made == []
    for text in "abc":
        compiler.compile(regex(text))
    assert len(made) == 1


def test_the_least_recently_used_grammars_go_first() -> None:
    inner = Compiler()
    compiler = CachedCompiler(lambda: inner, GrammarLimits(cache_entries=2))
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(regex(text))
    assert inner.texts == ["a", "b", "c", "b"]
    assert compiler.num_cached == 2


def test_the_bytes_of_the_descriptions_are_bounded() -> None:
    inner = Compiler()
    compiler = CachedCompiler(lambda: inner, GrammarLimits(cache_bytes=10))
    for text in ("é" * 3, "bbbb", "é" * 3, "c", "bbbb", "d" * 11, "c"):
        compiler.compile(regex(text))
    # 6 + 4 fit; c drives out bbbb, which has not been used for longest; d alone is too much.
    assert inner.texts == ["é" * 3, "bbbb", "c", "bbbb", "d" * 11, "c"]
    assert compiler.num_cached == 1


def test_a_thousand_grammars_leave_no_more_than_the_cache_holds() -> None:
    compiler = CachedCompiler(Compiler, GrammarLimits(cache_entries=8))
    for i in range(1000):
        compiler.compile(regex(f"a{{{i}}}"))
        assert compiler.num_cached <= 8
    assert compiler._kept_bytes == sum(spec.num_bytes for spec in compiler._kept)


def test_a_spoiled_grammar_is_made_again() -> None:
    inner = Compiler()
    compiler = CachedCompiler(lambda: inner)
    first = compiler.compile(regex("a"))
    assert isinstance(first, Compiled)
    first.usable = False
    second = compiler.compile(regex("a"))
    assert second is not first
    assert compiler.compile(regex("a")) is second
    assert (inner.texts, compiler.num_cached, compiler._kept_bytes) == (["a", "a"], 1, 1)


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_served() -> None:
    gate = threading.Event()

    def work(text: str) -> None:
        if text == "slow":
            gate.wait()

    compiler = CachedCompiler(lambda: Compiler(work), GrammarLimits(seconds=0.3))
    with held(gate):
        with pytest.raises(RequestError, match=r"^f: compiling the regex takes over 0.3 s"):
            compiler.compile(regex("slow", "f"))
        compiler.compile(regex("quick"))
    assert compiler.num_cached == 1


def test_slow_grammars_occupy_no_more_threads_than_allowed() -> None:
    gate, entered = threading.Event(), threading.Semaphore(0)

    def work(_: str) -> None:
        entered.release()
        gate.wait()

    inner = Compiler(work)
    compiler = CachedCompiler(lambda: inner, GrammarLimits(seconds=0.05, at_once=2))
    with held(gate):
        for text in "ab":
            with pytest.raises(RequestError, match="takes over"):
                compiler.compile(regex(text))
            entered.acquire()
        with pytest.raises(BusyError, match="other grammars are being compiled"):
            compiler.compile(regex("c"))
    assert inner.texts == ["a", "b"]


def test_a_thread_comes_free_when_its_grammar_is_done() -> None:
    compiler = CachedCompiler(Compiler, GrammarLimits(seconds=30.0, at_once=1))
    for text in "abc":
        compiler.compile(regex(text))
    assert compiler.num_cached == 3


@pytest.mark.parametrize("error", [ValueError("no\n  good"), Panic("no good"), MemoryError()])
def test_whatever_goes_wrong_is_the_error_of_that_request(error: BaseException) -> None:
    def work(text: str) -> None:
        if text == "bad":
            raise error

    compiler = CachedCompiler(lambda: Compiler(work), GrammarLimits(at_once=1))
    said = "no good|MemoryError"
    for _ in range(3):
        with pytest.raises(RequestError, match=f"^f: the regex cannot be compiled: ({said})$"):
            compiler.compile(regex("bad", "f"))
    compiler.compile(regex("good"))


def test_a_request_error_of_the_compiler_passes_unchanged() -> None:
    def work(_: str) -> None:
        raise RequestError("f", "the keyword")

    with pytest.raises(RequestError, match=r"^f: the keyword$"):
        CachedCompiler(lambda: Compiler(work)).compile(regex("a"))


@pytest.mark.parametrize("error", [ValueError("no bytes"), Panic("no bytes")])
def test_a_tokenizer_that_cannot_be_used_is_tried_once(error: BaseException) -> None:
    tries: list[int] = []

    def make() -> Compiler:
        tries.append(1)
        raise error

    compiler = CachedCompiler(make)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^f: grammars cannot be used .*: no bytes$"):
            compiler.compile(regex("a", "f"))
    assert tries == [1]


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "_BACKEND", "trtllm_lite.runtime.no_such_module")
    compiler = CachedCompiler(lambda: open_llguidance("{}", 4, (0,)))
    for _ in range(2):
        with pytest.raises(MissingExtraError, match=r"llguidance .*trtllm-lite\[serve\]"):
            compiler.compile(regex("a"))
