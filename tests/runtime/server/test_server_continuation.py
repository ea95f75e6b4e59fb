"""`continue_final_message`: an answer that goes on with what the assistant has said already."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.service import ModelCard

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
CARD = ModelCard(("fake",), 0, "fp", tool_format=TOOL_FORMATS["hermes"], reasoning=True)
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
GOES_ON = {"messages": TURNS, "continue_final_message": True}
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("start", [None, False])
def test_an_answer_is_that_of_the_text_so_far(run_lab: RunLab, start: bool | None) -> None:
    async def test(lab: Lab) -> None:
        asked = {**GOES_ON, "add_generation_prompt": start, "max_tokens": 9}
        want = (await lab.complete("uhi.awell, ", max_tokens=9)).json()
        made = (await lab.post(CHAT, asked)).json()
        assert made["choices"][0]["message"]["content"] == want["choices"][0]["text"]
        assert made["choices"][0]["message"]["role"] == "assistant"
        assert made["usage"]["prompt_tokens"] == len("uhi.awell, ")
        chunks = (await lab.post(CHAT, {**asked, "stream": True})).events()[:-1]
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(deltas) == want["choices"][0]["text"]
        other = (await lab.post(CHAT, {**asked, "continue_final_message": False})).json()
        ends = len("uhi.awell, .") + (start is None)
        assert other["usage"]["prompt_tokens"] == ends

    run_lab(test, template=TEMPLATE)


def test_its_tokens_are_told_before(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        made = (await lab.post("/tokenize", GOES_ON)).json()
        assert made["tokens"] == lab.llm.tokenizer.encode("uhi.awell, ")
        body = {"prompt": "ab", "continue_final_message": True}
        answer = await lab.post("/tokenize", body)
        assert (answer.status, answer.error["param"]) == (400, "continue_final_message")
        assert (
            await lab.post("/tokenize", {**body, "continue_final_message": False})
        ).status == 200

    run_lab(test, template=TEMPLATE)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"add_generation_prompt": True}, "allowed only with add_generation_prompt false"),
        ({"messages": TURNS[:1]}, "the last message is of the role 'user'"),
        ({"continue_final_message": 1}, "valid boolean"),
    ],
)
def test_what_cannot_be_gone_on_with_is_400(
    run_lab: RunLab, path: str, fields: dict[str, Any], told: str
) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.post(path, {**GOES_ON, **fields})
        answer.check_refused()
        assert answer.error["param"] == "continue_final_message"
        assert told in answer.error["message"]

    run_lab(test, template=TEMPLATE)


def test_no_variable_of_the_template_brings_it_in(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        given = {"continue_final_message": True}
        answer = await lab.chat(chat_template_kwargs=given)
        assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")

    run_lab(test)


@pytest.mark.parametrize(
    ("content", "thinks"), [("<think>hm, ", True), ("<think>hm</think>so ", False), ("so ", False)]
)
def test_reasoning_that_was_begun_is_gone_on_with(
    run_lab: RunLab, content: str, thinks: bool
) -> None:
    """Without the tag in the new text, which is in the prompt already."""

    async def test(lab: Lab) -> None:
        turns = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": content}]
        asked = {**GOES_ON, "messages": turns, "max_tokens": 9, "ignore_eos": True}
        message = (await lab.post(CHAT, asked)).json()["choices"][0]["message"]
        assert bool(message.get("reasoning_content")) is thinks
        assert bool(message["content"]) is not thinks

    run_lab(test, template=TEMPLATE, card=CARD)


@pytest.mark.parametrize("thinks", [False, True])
def test_a_call_may_end_what_was_begun(run_lab: RunLab, thinks: bool) -> None:
    """A forced one comes at once; after reasoning that was left open, not before its end."""

    async def test(lab: Lab) -> None:
        turns = [TURNS[0], {"role": "assistant", "content": "<think>hm" if thinks else "well "}]
        asked = {**GOES_ON, "messages": turns, "tools": [TOOL], "tool_choice": "required"}
        answer = await lab.post(CHAT, {**asked, "max_tokens": 200, "seed": 1})
        message = answer.json()["choices"][0]["message"]
        if thinks:
            assert message["reasoning_content"]
        else:
            assert message["tool_calls"][0]["function"]["name"] == "go"

    run_lab(test, template=TEMPLATE, card=replace(CARD, reasoning=thinks), room=256)
