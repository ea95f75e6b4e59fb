"""From what a caller hands in (text, token ids, messages) to a checked `Request`."""

import operator
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.grammar import Grammar, GrammarCompiler
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]

_NO_TOKENIZER = "the bundle has no tokenizer"


@dataclass(frozen=True)
class ChatOptions:
    """How messages become a prompt; `template` holds further variables for the chat template."""

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False


@dataclass(frozen=True)
class Source:
    """What a request starts from: one of these three."""

    prompt: str | None = None
    messages: Messages | None = None
    prompt_token_ids: Iterable[int] | None = None

    @property
    def is_single(self) -> bool:
        return sum(x is not None for x in (self.prompt, self.messages, self.prompt_token_ids)) == 1


@dataclass(frozen=True)
class Job:
    """A request and the text it came from; None when it came as token ids."""

    request: Request
    prompt: str | None


class RequestMaker:
    """Makes requests for one engine. Safe to use from several threads.

    `defaults` are for requests without parameters of their own. Their max_tokens gives way where
    the context is too short for it: nobody asked for it in this request. Without `grammars`,
    requests that need one are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams,
        config: EngineConfig,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._config = config
        self._grammars = grammars

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where there is none."""
        if self._tokenizer is None:
            raise RequestError("prompt", f"{_NO_TOKENIZER}; pass prompt_token_ids")
        return self._tokenizer

    def make(
        self,
        source: Source,
        params: SamplingParams | None,
        options: ChatOptions,
        request_id: str | None = None,
    ) -> Job:
        """A request from whatever the source holds. Raises RequestError unless that is one thing,
        and for chat options without messages."""
        if not source.is_single:
            raise RequestError("prompt", "give one of prompt, messages and prompt_token_ids")
        if source.messages is not None:
            return self.from_messages(source.messages, params, options, request_id)
        if options != ChatOptions():
            raise RequestError("messages", "chat options are for messages, and there are none")
        if source.prompt_token_ids is not None:
            return self.from_token_ids(source.prompt_token_ids, params, request_id)
        return self.from_text(source.prompt, params, request_id)

    def from_text(
        self, text: str | None, params: SamplingParams | None, request_id: str | None = None
    ) -> Job:
        """Raises RequestError for what is not text, or without a tokenizer."""
        arrival = time.monotonic()
        if not isinstance(text, str):
            raise RequestError("prompt", f"got {type(text).__name__}; allowed: str")
        ids = self.tokenizer.encode(text)
        return self._job(ids, text, params, request_id, arrival)

    def from_token_ids(
        self, ids: Iterable[int], params: SamplingParams | None, request_id: str | None = None
    ) -> Job:
        """Raises RequestError for what is not a sequence of integers."""
        arrival = time.monotonic()
        checked = token_ids(ids)
        return self._job(checked, None, params, request_id, arrival)

    def from_messages(
        self,
        messages: Messages,
        params: SamplingParams | None,
        options: ChatOptions,
        request_id: str | None = None,
    ) -> Job:
        """The prompt is what the chat template makes of the messages; its special tokens are part
        of it, so none are added. Without parameters an answer may fill the context."""
        arrival = time.monotonic()
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=options.tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **options.template,
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        params = replace(self._defaults, max_tokens=None) if params is None else params
        return self._job(ids, text, params, request_id, arrival)

    def _job(
        self,
        ids: Sequence[int],
        text: str | None,
        params: SamplingParams | None,
        request_id: str | None,
        arrival: float,
    ) -> Job:
        params = self._fitting(len(ids)) if params is None else params
        if not isinstance(params, SamplingParams):
            got = type(params).__name__
            raise RequestError("params", f"got {got}; allowed: SamplingParams or None")
        if params.stops and self._tokenizer is None:
            raise RequestError("stop", f"{_NO_TOKENIZER} to find it with; use stop_token_ids")
        grammar = self._grammar(params)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        return Job(Request(request_id, tuple(ids), params, arrival, grammar), text)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError(params.grammar.param, f"{_NO_TOKENIZER} to write such a text with")
        return self._grammars.compile(params.grammar)

    def _fitting(self, prompt_tokens: int) -> SamplingParams:
        wanted = self._defaults.max_tokens or 0
        if prompt_tokens + wanted > self._config.max_sequence_tokens:
            return replace(self._defaults, max_tokens=None)
        return self._defaults


def token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """The ids as plain integers. Raises RequestError; their range is the engine's business."""
    try:
        values = tuple(ids)
        if any(isinstance(x, bool) for x in values):
            raise TypeError
        return tuple(operator.index(x) for x in values)
    except TypeError:
        allowed = "allowed: a sequence of integers"
        raise RequestError("prompt_token_ids", f"got {_shown(ids)}; {allowed}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
