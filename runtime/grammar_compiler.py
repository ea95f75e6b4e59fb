"""Compiling grammars that strangers wrote: off the engine's thread, in bounded time, once each."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import TypeVar

from trtllm_lite.runtime.errors import (
    BusyError,
    MissingExtraError,
    RequestError,
    TrtllmLiteError,
)
from trtllm_lite.runtime.grammar import Grammar, GrammarCompiler
from trtllm_lite.runtime.grammar_spec import GrammarSpec

T = TypeVar("T")

_BACKEND = "trtllm_lite.runtime.llguidance_grammar"
_LONGEST_REASON = 300


@dataclass(frozen=True)
class GrammarLimits:
    """seconds: of compiling one grammar. at_once: grammars in the making. cache_entries,
    cache_bytes: grammars that are kept, and the bytes of their descriptions together."""

    seconds: float = 1.0
    at_once: int = 2
    cache_entries: int = 64
    cache_bytes: int = 4 * 2**20


class CachedCompiler:
    """A `GrammarCompiler` in front of another one, which `open_compiler` makes at first use.

    Whatever the other one raises, panics of native code included, becomes a RequestError. Raises
    BusyError while all threads are occupied by other grammars, and MissingExtraError.
    """

    def __init__(
        self, open_compiler: Callable[[], GrammarCompiler], limits: GrammarLimits | None = None
    ) -> None:
        self._open = open_compiler
        self._limits = limits or GrammarLimits()
        self._workers = _Workers(self._limits.seconds, self._limits.at_once)
        self._opening = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._refusal: str | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._kept_bytes = 0

    @property
    def num_cached(self) -> int:
        """Grammars that are kept."""
        return len(self._kept)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """The grammar that is kept, while it is usable, or a new one."""
        kept = self._find(spec)
        if kept is not None:
            return kept
        compiler = self._opened(spec)
        try:
            grammar = self._workers.run(lambda: compiler.compile(spec))
        except TimeoutError:
            took = f"compiling the {spec.kind} takes over {self._limits.seconds:g} s"
            raise RequestError(spec.param, f"{took}; simplify it") from None
        except TrtllmLiteError:
            raise
        except Exception as error:
            reason = f"the {spec.kind} cannot be compiled: {_one_line(error)}"
            raise RequestError(spec.param, reason) from error
        self._keep(spec, grammar)
        return grammar

    def _opened(self, spec: GrammarSpec) -> GrammarCompiler:
        """The other compiler. Making it is not part of any grammar's time; a failure is final."""
        with self._opening:
            if self._compiler is None and self._refusal is None:
                try:
                    self._compiler = self._open()
                except (MissingExtraError, KeyboardInterrupt, SystemExit):
                    raise
                # A panic of native code is no Exception.
                except BaseException as error:
                    self._refusal = _one_line(error)
            if self._compiler is None:
                what = "grammars cannot be used with the tokenizer of this bundle"
                raise RequestError(spec.param, f"{what}: {self._refusal}")
            return self._compiler

    def _find(self, spec: GrammarSpec) -> Grammar | None:
        with self._lock:
            grammar = self._kept.get(spec)
            if grammar is None or not grammar.usable:
                return None
            self._kept.move_to_end(spec)
            return grammar

    def _keep(self, spec: GrammarSpec, grammar: Grammar) -> None:
        with self._lock:
            if self._kept.pop(spec, None) is None:
                self._kept_bytes += spec.num_bytes
            self._kept[spec] = grammar
            while self._is_too_much():
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.num_bytes

    def _is_too_much(self) -> bool:
        limits = self._limits
        return len(self._kept) > limits.cache_entries or self._kept_bytes > limits.cache_bytes


def open_llguidance(
    tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> GrammarCompiler:
    """llguidance for a bundle's tokenizer. Raises MissingExtraError without the library, and what
    `LLGuidanceCompiler` does."""
    try:
        module = import_module(_BACKEND)
    except ImportError as error:
        raise MissingExtraError("llguidance", "serve") from error
    compiler: GrammarCompiler = module.LLGuidanceCompiler(tokenizer_json, vocab_size, eos_token_ids)
    return compiler


class _Workers:
    """Runs work on a thread of its own, and waits for it no longer than `seconds`.

    Native code cannot be interrupted: what takes longer keeps its thread until it is done, and at
    most `at_once` threads are out, so that no number of requests occupies more of the machine. They
    are daemons: none of them keeps the process from ending.
    """

    def __init__(self, seconds: float, at_once: int) -> None:
        self._seconds = seconds
        self._free = threading.BoundedSemaphore(at_once)

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises; RuntimeError for a panic. Raises TimeoutError, and
        BusyError without a free thread."""
        if not self._free.acquire(timeout=self._seconds):
            raise BusyError("other grammars are being compiled; try again in a moment")
        answer: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        try:
            threading.Thread(
                target=self._work, args=(work, answer), name="trtllm-lite-grammar", daemon=True
            ).start()
        except BaseException:
            self._free.release()
            raise
        try:
            result = answer.get(timeout=self._seconds)
        except Empty:
            raise TimeoutError from None
        if isinstance(result, Exception):
            raise result
        return result[0]

    def _work(self, work: Callable[[], T], answer: "SimpleQueue[tuple[T] | Exception]") -> None:
        result: tuple[T] | Exception
        try:
            result = (work(),)
        except Exception as error:
            result = error
        # A panic of native code is no Exception, and must not end the thread unseen.
        except BaseException as error:
            result = RuntimeError(_one_line(error))
        self._free.release()
        answer.put(result)


def _one_line(error: BaseException) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
