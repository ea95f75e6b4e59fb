"""What is refused before it is queued, with the numbers that a user needs."""

from collections.abc import Iterable
from typing import Any

import pytest

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import ContextLengthError, RequestError
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.request_checks import check_request, max_length
from trtllm_lite.runtime.sampling_params import SamplingParams

VOCAB = 61


def config(model_len: int = 64, kv_tokens: int = 256) -> EngineConfig:
    return EngineConfig(4, model_len, 32, kv_tokens)


def request(prompt: Iterable[int], **params: Any) -> Request:
    return Request("a", tuple(prompt), SamplingParams(**params))


REFUSED: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "empty": ([], {}, "prompt: got no tokens"),
    "negative": ([1, -1], {}, "prompt: token id -1 is outside the vocabulary"),
    "unknown": ([VOCAB], {}, "prompt: token id 61 is outside the vocabulary"),
    "stop id": ([1], {"stop_token_ids": (61,)}, "stop_token_ids: token id 61"),
    "bias id": ([1], {"logit_bias": {99: 1.0}}, "logit_bias: token id 99"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokens_that_the_model_does_not_have(case: str) -> None:
    prompt, params, message = REFUSED[case]
    with pytest.raises(RequestError, match=message):
        check_request(request(prompt, **params), config(), VOCAB)


def test_the_whole_vocabulary_can_be_used() -> None:
    last = VOCAB - 1
    params = {"stop_token_ids": (last,), "logit_bias": {last: 1.0}}
    check_request(request([0, last], **params), config(), VOCAB)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "numbers"),
    [
        (20, {}, "prompt", r"20 prompt tokens \+ 1 generated token = 21"),
        (15, {"max_tokens": 6}, "max_tokens", r"15 prompt tokens \+ max_tokens 6 = 21"),
        (15, {"min_tokens": 6}, "min_tokens", r"15 prompt tokens \+ min_tokens 6 = 21"),
    ],
)
@pytest.mark.parametrize(
    ("limits", "name"),
    [(config(model_len=20), "max_model_len"), (config(kv_tokens=20), "max_kv_tokens")],
)
def test_one_token_too_many_is_refused_with_both_numbers(
    prompt: int, params: dict[str, Any], param: str, numbers: str, limits: EngineConfig, name: str
) -> None:
    wanted = (
        rf"^{param}: this model's maximum context length is 20 tokens \({name}\); got {numbers}; "
    )
    params = {"max_tokens": None, **params}
    with pytest.raises(ContextLengthError, match=wanted):
        check_request(request(range(prompt), **params), limits, VOCAB)
    check_request(request(range(prompt - 1), **params), limits, VOCAB)


@pytest.mark.parametrize(
    ("max_tokens", "limits", "expected"),
    [
        (5, config(), 8),
        (None, config(), 64),
        (None, config(kv_tokens=30), 30),
    ],
)
def test_where_a_sequence_ends(max_tokens: int | None, limits: EngineConfig, expected: int) -> None:
    assert max_length(request([1, 2, 3], max_tokens=max_tokens), limits) == expected
