"""Both completion routes: what they take, what they refuse, and what the parameters do."""

from typing import Any

import pytest

from trtllm_lite.tools.conformance.frontend.client import (
    CHAT,
    COMPLETIONS,
    PROMPT,
    Frontend,
)

EXPERT = {"role": "system", "content": "You are an expert of inference servers."}
USER = {"role": "user", "content": PROMPT}
PARTS = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
TAKEN: list[tuple[str, Any]] = [
    ("temperature", 0.7),
    ("max_tokens", 10),
    ("top_p", 0.9),
    ("frequency_penalty", 0.5),
    ("presence_penalty", 0.2),
    ("n", 1),
    ("stop", "."),
    ("stop", []),
    ("stop", [".", ","]),
    ("logit_bias", {"0": 0}),
    ("min_tokens", 16),
    ("ignore_eos", True),
]
REFUSED: list[tuple[str, Any]] = [
    ("temperature", 2.1),
    ("temperature", -0.1),
    ("max_tokens", -1),
    ("top_p", 1.1),
    ("frequency_penalty", 3),
    ("frequency_penalty", -3),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("min_tokens", -1),
    ("ignore_eos", 123),
]


@pytest.mark.parametrize("messages", [[EXPERT, USER], [EXPERT], [USER], [PARTS]])
def test_a_conversation_is_answered(frontend: Frontend, messages: list[Any]) -> None:
    message = frontend.good(CHAT, messages=messages, max_tokens=16, temperature=0)["choices"][0][
        "message"
    ]
    assert message["content"].strip()
    assert message["role"] == "assistant"


@BOTH
def test_usage_adds_up(frontend: Frontend, path: str) -> None:
    usage = frontend.good(path, max_tokens=16)["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["completion_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@BOTH
@pytest.mark.parametrize(("name", "value"), TAKEN)
def test_a_parameter_is_taken(frontend: Frontend, path: str, name: str, value: Any) -> None:
    answer = frontend.good(path, **{"max_tokens": 24, name: value})
    assert answer["usage"]["completion_tokens"] > 0


def test_logprobs_are_taken(frontend: Frontend) -> None:
    assert frontend.text(CHAT, logprobs=True, max_tokens=8, temperature=0)
    assert frontend.text(COMPLETIONS, logprobs=5, max_tokens=8, temperature=0)


def test_a_neutral_best_of_is_taken(frontend: Frontend) -> None:
    assert frontend.text(COMPLETIONS, best_of=1, max_tokens=8, temperature=0)


@BOTH
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_out_of_range_is_refused(
    frontend: Frontend, path: str, name: str, value: Any
) -> None:
    response = frontend.post(path, **{name: value})
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["param"] == name


@BOTH
def test_what_does_not_fit_the_schema_is_422(frontend: Frontend, path: str) -> None:
    assert frontend.post(path, temperature=2.1).status_code == 422


@pytest.mark.parametrize("messages", [[], [{}], ...])
def test_a_conversation_needs_messages(frontend: Frontend, messages: Any) -> None:
    response = frontend.post(CHAT, messages=messages)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ["", ...])
def test_a_completion_needs_a_prompt(frontend: Frontend, prompt: Any) -> None:
    response = frontend.post(COMPLETIONS, prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@BOTH
def test_a_request_needs_a_model(frontend: Frontend, path: str) -> None:
    assert 400 <= frontend.post(path, model=..., max_tokens=1).status_code < 500


@BOTH
def test_an_unknown_model_is_refused(frontend: Frontend, path: str) -> None:
    assert frontend.post(path, model="no-such-model").status_code in (400, 404)


@BOTH
@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 2}, {"n": 2, "best_of": 1}])
def test_one_choice_only(frontend: Frontend, path: str, fields: dict[str, int]) -> None:
    assert frontend.post(path, max_tokens=4, **fields).status_code == 400


@BOTH
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_most_tokens_are_kept_to(frontend: Frontend, path: str, name: str) -> None:
    if (path, name) == (COMPLETIONS, "max_completion_tokens"):
        pytest.skip("a field of conversations")
    lengths = []
    for most in (1, 1, 64):
        answer = frontend.good(path, **{name: most}, ignore_eos=True)
        lengths.append(answer["usage"]["completion_tokens"])
    assert lengths == [1, 1, 64]


def test_the_newer_name_wins(frontend: Frontend) -> None:
    fields: dict[str, Any] = {"max_tokens": 50, "max_completion_tokens": 5, "ignore_eos": True}
    assert frontend.good(CHAT, **fields)["usage"]["completion_tokens"] == 5
    fields = {"max_tokens": 3, "max_completion_tokens": None, "ignore_eos": True}
    assert frontend.good(CHAT, **fields)["usage"]["completion_tokens"] == 3


@BOTH
def test_temperature_zero_repeats_and_one_does_not(frontend: Frontend, path: str) -> None:
    cold = [frontend.text(path, temperature=0, max_tokens=48) for _ in range(2)]
    warm = [frontend.text(path, temperature=1, max_tokens=48) for _ in range(2)]
    assert cold[0] == cold[1]
    assert warm[0] != warm[1]


@BOTH
def test_a_seed_repeats(frontend: Frontend, path: str) -> None:
    first, again, other = (
        frontend.text(path, temperature=1, max_tokens=48, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("echo", [False, True])
def test_echo_puts_the_prompt_first(frontend: Frontend, echo: bool) -> None:
    text = frontend.text(COMPLETIONS, echo=echo, temperature=0)
    assert text.startswith(PROMPT) is echo


def test_a_stream_may_be_declined(frontend: Frontend) -> None:
    assert frontend.text(CHAT, stream=False, max_tokens=8, temperature=0).strip()
