"""Combinations of fields, good and bad, drawn at random: case 30 of docs/robustness.md. One legal
combination that nobody thought of must not be a server error, and must not end the engine."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.service import ModelCard

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

HERMES = ModelCard(("fake",), 0, "fp", tool_format=TOOL_FORMATS["hermes"])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 0.5, -0.5, 1e308, "", "x", "é", "\0"),
    *([], [None], [[]], [1], ["x"], {}, {"x": None}, {"type": "x"}, [{}], "1", 3),
)
MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [TOOL]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
)
PROMPTS: tuple[Any, ...] = ("hello", ["a", "b"], [1, 2, 3], [[1], [2, 3]])
COMMON: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 3),
    "n": (1, 2),
    "temperature": (0, 0.7, 2),
    "top_p": (0.1, 1),
    "top_k": (-1, 1, 5),
    "min_p": (0, 0.5, 1),
    "seed": (0, 2**63 - 1),
    "stop": ("a", ["a", "b"]),
    "stop_token_ids": ([], [1]),
    "ignore_eos": (True, False),
    "min_tokens": (0, 1, 2),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (False,),
    "logit_bias": ({}, {"1": 100}, {"1": -100}),
    "repetition_penalty": (0.5, 2),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "guided_json": (SCHEMA,),
    "guided_regex": ("a+",),
    "guided_choice": (["a", "b"],),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}),
    "model": ("fake", "nobody"),
    "user": ("me",),
}
OF_CHAT: dict[str, tuple[Any, ...]] = {
    "logprobs": (True, False),
    "top_logprobs": (0, 5),
    "tools": ([TOOL],),
    "tool_choice": ("auto", "required", "none"),
    "parallel_tool_calls": (True, False),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
    "chat_template_kwargs": ({"mood": "x"}, {"none": 1}),
    "max_completion_tokens": (2,),
}
OF_TEXT: dict[str, tuple[Any, ...]] = {"logprobs": (0, 3), "echo": (True, False)}


def drawn(chance: random.Random, fields: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """A few fields, most of them good."""
    names = chance.sample(sorted(fields), chance.randint(0, 7))
    bad = chance.random() < 0.4
    return {
        name: chance.choice(STRANGE if bad and chance.random() < 0.3 else fields[name])
        for name in names
    }


@pytest.mark.parametrize("seed", range(4))
def test_no_combination_of_fields_is_a_server_error(run_lively: RunLab, seed: int) -> None:
    async def test(lab: Lab) -> None:
        chance, statuses = random.Random(seed), set()
        for _ in range(75):
            if chance.random() < 0.5:
                path, start = "/v1/chat/completions", {"messages": chance.choice(MESSAGES)}
                body = {**start, "max_tokens": 2, **drawn(chance, {**COMMON, **OF_CHAT})}
            else:
                path, start = "/v1/completions", {"prompt": chance.choice(PROMPTS)}
                body = {**start, **drawn(chance, {**COMMON, **OF_TEXT})}
            answer = await lab.start("POST", path, chunks=[json.dumps(body).encode()]).whole()
            statuses.add(answer.status)
            if answer.status == 200:
                check_answer(answer, body)
            else:
                assert answer.status in (400, 404), (body, answer.body)
                answer.check_refused(answer.status)
        assert {200, 400} <= statuses

    run_lively(test, card=HERMES, room=128)


def check_answer(answer: Any, body: dict[str, Any]) -> None:
    """A stream that has begun ends well, too."""
    if not body.get("stream"):
        assert len(answer.json()["choices"]) >= 1
        return
    *events, done = answer.events()
    assert done == "[DONE]", body
    assert not any("error" in event for event in events), (body, events)
