"""What `SamplingParams` accepts, refuses by name, and keeps."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import numpy as np
import pytest

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", True),
        ("n", 0),
        ("n", 129),
        ("seed", 2**63),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", 3]),
        ("stop", None),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", ["x"] * 17),
        ("stop", "\ud800"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "ab"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", [1.0]),
        ("ignore_eos", "false"),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
        ("skip_special_tokens", 0),
        ("speculation", 1),
        ("speculation", "ngram"),
    ],
)
def test_refuses_by_name(name: str, value: object) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"^{name}: ") as caught:
        SamplingParams(**arguments)
    assert caught.value.param == name
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 100),
        ("top_p", 1),
        ("top_p", 5e-324),
        ("min_p", 1.0),
        ("top_k", -1),
        ("top_k", 2**40),
        ("n", 128),
        ("seed", -(2**63)),
        ("logprobs", 0),
        ("logprobs", 20),
        ("max_tokens", None),
        ("stop", "a"),
        ("stop", ["x"] * 16),
        ("logit_bias", {0: -100, 7: 100.0}),
    ],
)
def test_accepts_the_bounds(name: str, value: object) -> None:
    arguments: dict[str, Any] = {name: value}
    SamplingParams(**arguments)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match="6 is more than max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_numpy_scalars_become_python_numbers() -> None:
    arguments: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(3),
        "stop_token_ids": [np.int32(7)],
        "logit_bias": {np.int64(2): np.float32(1.5)},
        "min_p": 0,
    }
    params = SamplingParams(**arguments)
    assert type(params.temperature) is float
    assert type(params.min_p) is float
    assert type(params.top_k) is int
    assert [type(i) for i in params.stop_token_ids] == [int]
    assert [(type(k), type(v)) for k, v in params.logit_bias.items()] == [(int, float)]


def test_lists_are_kept_as_tuples_that_the_caller_cannot_change() -> None:
    ids, bias = [3], {1: 2.0}
    params = SamplingParams(stop=["a", "b"], stop_token_ids=ids, logit_bias=bias)
    ids.append(4)
    bias[1] = 9.0
    assert params.stops == ("a", "b")
    assert params.stop_token_ids == (3,)
    assert dict(params.logit_bias) == {1: 2.0}
    assert SamplingParams(stop="ab").stops == ("ab",)


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_is_a_value() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0, 3: 4.0})
    same = SamplingParams(stop=("a",), logit_bias={3: 4.0, 1: 2.0})
    other = replace(params, logit_bias={1: 2.5})
    assert params == same
    assert hash(params) == hash(same)
    assert params != other
    assert len({params, same, other}) == 2
    for clone in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        assert clone == params
    assert dict(asdict(params)["logit_bias"]) == {1: 2.0, 3: 4.0}
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]  # the point: a frozen field refuses the assignment
    with pytest.raises(TypeError):
        params.logit_bias[1] = 5.0  # type: ignore[index]  # the point: the mapping is read-only
