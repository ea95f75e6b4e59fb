"""From checked request bodies to what the engine takes. Nothing here waits or tokenizes."""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.request_maker import ChatOptions, Source
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.constraints import grammar_of
from trtllm_lite.runtime.server.errors import ApiError, invalid
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.protocol.common import UNSUPPORTED, Sampling
from trtllm_lite.runtime.server.protocol.completion import CompletionRequest
from trtllm_lite.runtime.server.protocol.tokens import TokenizeRequest
from trtllm_lite.runtime.server.settings import Limits
from trtllm_lite.runtime.server.tool_calls import ToolUse

COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where a request has none (OpenAI's number)."""
MAX_TOKENS = "max_tokens"
"""The engine's name for the most tokens that are generated; routes may have others."""
_TOKEN_ID = re.compile(r"[0-9]{1,12}")
_MAX_TOKENS = re.compile(rf"\b{MAX_TOKENS}\b")
_TAKEN = frozenset(inspect.signature(AsyncLLM.submit).parameters)
"""Names that are ours where variables of the chat template are handed over."""
_PLAIN = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "ignore_eos", "min_tokens", "include_stop_str_in_output"),
    "skip_special_tokens",
)


@dataclass(frozen=True)
class Ask:
    """One prompt for the engine. `optional_length`: nobody asked for this max_tokens, so it gives
    way where the context is too short for it."""

    source: Source
    params: SamplingParams
    options: ChatOptions = field(default_factory=ChatOptions)
    optional_length: bool = False


def chat_ask(
    body: ChatRequest,
    defaults: SamplingParams,
    limits: Limits,
    room: int,
    *,
    grammar: GrammarSpec | None = None,
    tools: ToolUse | None = None,
) -> Ask:
    """The prompt of a conversation; `room`: tokens of the context. `grammar` and `tools` are those
    of the body. Raises ApiError, RequestError."""
    check_size("messages", body.messages, limits, room)
    if tools is not None:
        check_size("tools", list(tools.template), limits, room)
    max_tokens = body.max_completion_tokens
    params = sampling_params(
        body,
        defaults,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        logprobs=_chat_logprobs(body),
        grammar=grammar,
    )
    if tools is not None and tools.form.needs_special_tokens:
        params = replace(params, skip_special_tokens=False)
    return Ask(Source(messages=body.messages), params, chat_options(body, tools))


def chat_options(body: ChatRequest | TokenizeRequest, tools: ToolUse | None = None) -> ChatOptions:
    """How the template is called. Raises ApiError for variables with names that are not the
    template's; which of the others it uses is checked where it is rendered."""
    template = dict(body.chat_template_kwargs or {})
    for name in template.keys() & _TAKEN:
        message = f"chat_template_kwargs: {name!r} is not a variable of the template's own"
        raise invalid(message, "chat_template_kwargs")
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        template["reasoning_effort"] = body.reasoning_effort
    given = None if tools is None else list(tools.template)
    goes_on = body.continue_final_message is True
    starts = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    return ChatOptions(given, starts, template, goes_on)


def completion_asks(
    body: CompletionRequest, defaults: SamplingParams, limits: Limits, room: int
) -> list[Ask]:
    """One for each prompt, in order. Raises ApiError, RequestError."""
    sources = _sources(body, limits)
    check_size("prompt", [s.prompt or "" for s in sources], limits, room)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens: got 0, which is allowed with echo only", "max_tokens")
    wanted = COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    params = sampling_params(
        body, defaults, max_tokens=wanted, logprobs=body.logprobs, grammar=grammar_of(body)
    )
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=body.logprobs)
    _check_choices(len(sources) * params.n, limits)
    optional = body.max_tokens is None
    return [Ask(source, params, optional_length=optional) for source in sources]


def sampling_params(
    body: Sampling,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: GrammarSpec | None,
) -> SamplingParams:
    """`defaults` (the bundle's) with what the request says. Raises ApiError, RequestError."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: allowed only when stream is true", "stream_options")
    given = {name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None}
    if body.stop is not None:
        given["stop"] = body.stop
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return replace(defaults, **given, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)


def check_size(param: str, value: object, limits: Limits, room: int) -> None:
    """Raises ApiError for more text than could ever fit, before anything tokenizes it."""
    most, size = room * limits.chars_per_token, text_size(value)
    if size > most:
        raise ApiError(
            400,
            f"{param}: this model's maximum context length is {room} tokens; got {size} "
            f"characters, and more than {most} are not tokenized; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def text_size(value: object) -> int:
    """Characters of all strings in JSON data."""
    size, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list):
            left.extend(item)
        elif isinstance(item, Mapping):
            left.extend(item)
            left.extend(item.values())
    return size


def _chat_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise invalid("top_logprobs: allowed only when logprobs is true", "top_logprobs")
    return None


def _sources(body: CompletionRequest, limits: Limits) -> list[Source]:
    prompt = body.prompt
    if not prompt or (isinstance(prompt, list) and any(p == "" for p in prompt)):
        raise invalid("prompt: got nothing; a prompt needs at least one token", "prompt")
    if isinstance(prompt, str):
        return [Source(prompt=prompt)]
    ids = [x for x in prompt if isinstance(x, int)]
    if ids:
        return [Source(prompt_token_ids=ids)]
    if len(prompt) > limits.prompts:
        message = f"prompt: got {len(prompt)} prompts; at most {limits.prompts}"
        raise invalid(message, "prompt")
    return [_source(each) for each in prompt]


def _source(prompt: str | int | Iterable[int]) -> Source:
    if isinstance(prompt, str):
        return Source(prompt=prompt)
    return Source(prompt_token_ids=[prompt] if isinstance(prompt, int) else list(prompt))


def _check_choices(count: int, limits: Limits) -> None:
    if count > limits.choices:
        message = f"n: {count} choices over all prompts; at most {limits.choices}"
        raise invalid(message, "n")


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        message = f"logit_bias: got the key {key[:40]!r}; allowed: token ids"
        raise invalid(message, "logit_bias")
    return int(key)


def with_length_name(error: ApiError, name: str) -> ApiError:
    """What the engine says of max_tokens, in words of whoever sent it as `name`. Such messages hold
    nothing else that a client wrote but numbers."""
    if error.param in (MAX_TOKENS, "min_tokens"):
        error.message = _MAX_TOKENS.sub(name, error.message)
        error.param = name if error.param == MAX_TOKENS else error.param
    return error


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error under the field's name in this route: the engine knows some by another. What is
    refused before the engine sees it has its own name."""
    name = names.get(error.param or "")
    if name is not None and error.code != UNSUPPORTED:
        error.message = f"{name}: {error.message.removeprefix(f'{error.param}: ')}"
        error.param = name
    return error
