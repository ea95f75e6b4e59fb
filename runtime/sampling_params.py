"""`SamplingParams`: how one request wants its tokens chosen. Frozen, checked once at creation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from trtllm_lite.runtime.errors import RequestError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
INT64 = 2**63


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, named as vLLM names them.

    Order of application: logit_bias; min_tokens (end tokens masked); repetition, then presence and
    frequency penalties; temperature; top_k; top_p; min_p; draw. Logprobs are of the raw model
    distribution, before any of these.

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
    skip_special_tokens: leave special tokens out of the text.

    Raises RequestError, a ValueError, that names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_bias()

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, low_open=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("top_k", self.top_k, -1, INT64 - 1)
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.seed is not None:
            _integer("seed", self.seed, -INT64, INT64 - 1)

    def _check_lengths(self) -> None:
        _integer("min_tokens", self.min_tokens, 0, INT64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, INT64 - 1)
            if self.min_tokens > self.max_tokens:
                got = f"{self.min_tokens} is more than max_tokens {self.max_tokens}"
                raise RequestError("min_tokens", got)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise RequestError("stop", f"{len(self.stop)} stop strings; at most {MAX_STOPS}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError("stop", f"got {text!r}; allowed: non-empty strings")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, INT64 - 1)

    def _check_bias(self) -> None:
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, INT64 - 1)
            _number("logit_bias", bias, -100.0, 100.0)


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low < value if low_open else low <= value) or value > high:  # type: ignore[operator]
        bracket = "(" if low_open else "["
        raise RequestError(name, f"got {value!r}; allowed: {bracket}{low:g}, {high:g}]")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(name, f"got {value!r}; allowed: integers from {low} to {high}")
