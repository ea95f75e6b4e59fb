"""What the engine refuses at once: requests that it could never serve."""

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import ContextLengthError, RequestError
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampler import check_token_ids


def check_request(request: Request, config: EngineConfig, vocab_size: int) -> None:
    """Raise RequestError for tokens that the model does not have, ContextLengthError for more
    tokens than one sequence may hold."""
    if not request.prompt_token_ids:
        raise RequestError("prompt", "got no tokens; a prompt needs at least one")
    check_token_ids("prompt", request.prompt_token_ids, vocab_size)
    check_token_ids("stop_token_ids", request.params.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", request.params.logit_bias, vocab_size)
    spec = request.params.grammar
    if spec is not None and request.grammar is None:
        raise RequestError(spec.param, "the request holds no compiled grammar; see RequestMaker")
    _check_length(request, config)


def max_length(request: Request, config: EngineConfig) -> int:
    """Tokens, prompt included, at which its sequences end."""
    if request.params.max_tokens is None:
        return config.max_sequence_tokens
    wanted = len(request.prompt_token_ids) + request.params.max_tokens
    return min(wanted, config.max_sequence_tokens)


def _check_length(request: Request, config: EngineConfig) -> None:
    prompt, params = len(request.prompt_token_ids), request.params
    if prompt + 1 > config.max_sequence_tokens:
        raise _too_long("prompt", config, prompt, "1 generated token", 1, "shorten the prompt")
    for name, value in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
        if value is not None and prompt + value > config.max_sequence_tokens:
            action = f"shorten the prompt or lower {name}"
            raise _too_long(name, config, prompt, f"{name} {value}", value, action)


def _too_long(
    param: str, config: EngineConfig, prompt: int, what: str, extra: int, action: str
) -> ContextLengthError:
    limit = config.max_sequence_tokens
    source = "max_model_len" if limit == config.max_model_len else "max_kv_tokens"
    return ContextLengthError(
        param,
        f"this model's maximum context length is {limit} tokens ({source}); got {prompt} prompt "
        f"tokens + {what} = {prompt + extra}; {action}",
    )
