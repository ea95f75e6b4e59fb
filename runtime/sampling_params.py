"""`SamplingParams`: how one request wants its tokens chosen. Frozen, checked once at creation."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.grammar_spec import GrammarSpec

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
INT64 = 2**63


class FrozenBias(Mapping[int, float]):
    """A logit_bias that cannot change: hashable, and can be copied and pickled."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[int, float]) -> None:
        self._items = dict(items)

    def __getitem__(self, token_id: int) -> float:
        return self._items[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, named as vLLM names them.

    Order of application: grammar; logit_bias; min_tokens (end tokens masked); repetition, then
    presence and frequency penalties; temperature; top_k; top_p; min_p; draw. Logprobs are of the
    raw model distribution, before any of these.

    n: choices per prompt, each with its own random stream.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p in (0, 1]. min_p in [0, 1].
    repetition_penalty: > 0, over prompt and generated tokens (CTRL, arXiv:1909.05858).
    presence_penalty, frequency_penalty: [-2, 2], over generated tokens (OpenAI's definition).
    logit_bias: token id -> added to the logit, [-100, 100].
    seed: the same seed gives the same tokens whatever else is in the batch; None draws one.
    max_tokens: most tokens to generate; None is as many as the context holds.
    min_tokens: no end token and no stop before this many.
    stop: strings that end the text; not part of it unless include_stop_str_in_output.
    stop_token_ids: further ids that end it. ignore_eos: the model's own end tokens do not.
    logprobs: how many alternatives per generated token; 0 is the chosen token only.
    prompt_logprobs: the same for prompt tokens.
    speculation: guess tokens from the text so far and check several at once, which changes the
        speed and not the tokens; None is as the engine was opened.
    skip_special_tokens: leave special tokens out of the text.
    grammar: what the text has to be. Only tokens with which it can still become that are chosen,
        and end tokens where it is; min_tokens gives way where nothing else may follow. An answer
        that a stop string or max_tokens cuts short is the beginning of such a text.

    Numbers may be numpy scalars; they are kept as int and float. Raises RequestError, a ValueError,
    that names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: bool | None = None
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_bias()
        self._check_grammar()
        if not isinstance(self.speculation, bool | None):
            got = f"got {self.speculation!r}; allowed: True, False or None"
            raise RequestError("speculation", got)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                got = f"got {getattr(self, name)!r}; allowed: True or False"
                raise RequestError(name, got)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name, low, high, low_open in _FLOATS:
            self._set(name, _number(name, getattr(self, name), low, high, low_open=low_open))
        self._set("top_k", _integer("top_k", self.top_k, -1, INT64 - 1))
        self._set("n", _integer("n", self.n, 1, MAX_CHOICES))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -INT64, INT64 - 1))

    def _check_lengths(self) -> None:
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, INT64 - 1))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, INT64 - 1))
            if self.min_tokens > self.max_tokens:
                got = f"{self.min_tokens} is more than max_tokens {self.max_tokens}"
                raise RequestError("min_tokens", got)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if len(stop) > MAX_STOPS:
            raise RequestError("stop", f"{len(stop)} stop strings; at most {MAX_STOPS}")
        for text in stop:
            if not isinstance(text, str) or not text or not _is_unicode(text):
                raise RequestError("stop", f"got {text!r}; allowed: non-empty Unicode strings")
        ids = _items("stop_token_ids", self.stop_token_ids)
        self._set("stop", stop)
        self._set("stop_token_ids", tuple(_integer("stop_token_ids", i, 0, INT64 - 1) for i in ids))

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            got = f"got {self.logit_bias!r}; allowed: a mapping from token ids to numbers"
            raise RequestError("logit_bias", got)
        bias = {
            _integer("logit_bias", token, 0, INT64 - 1): _number("logit_bias", value, -100.0, 100.0)
            for token, value in self.logit_bias.items()
        }
        self._set("logit_bias", FrozenBias(bias))

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, GrammarSpec | None):
            got = f"got {type(self.grammar).__name__}; allowed: a GrammarSpec or None"
            raise RequestError("grammar", got)
        if self.grammar is not None and self.ignore_eos is True:
            got = "got True with a grammar, whose texts end with an end token; leave it out"
            raise RequestError("ignore_eos", got)


_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_FLOATS = (
    # name, lowest, highest, whether the lowest itself is excluded
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 1e6, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    number = _as_float(value)
    if not (low < number if low_open else low <= number) or number > high:
        bracket = "(" if low_open else "["
        raise RequestError(name, f"got {value!r}; allowed: {bracket}{low:g}, {high:g}]")
    return number


def _as_float(value: object) -> float:
    """NaN, which no range holds, for what is not a number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high:
        return int(value)
    raise RequestError(name, f"got {value!r}; allowed: integers from {low} to {high}")


def _items(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(name, f"got {value!r}; allowed: a list")
    return tuple(value)


def _is_unicode(text: str) -> bool:
    """False for lone surrogates: no text that a model writes holds one."""
    return not any("\ud800" <= c <= "\udfff" for c in text)
