"""Chat templates that refuse, and those that take too much: they fail their own request alone."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.isolated_template import IsolatedTemplate, TemplateLimits

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

CHAT = "/v1/chat/completions"
REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system message here;\nput it first') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
COSTLY = (
    "{% set said = messages[0].content %}{{ said }}"
    "{% set words = ('ab,' * 1300000).split(',') if said == 'huge' else [] %}"
    "{{ words|map('upper')|list|length if words else '' }}"
    "{% set path = ('0.' * 50000) ~ '0' if said == 'slow' else '' %}"
    "{{ ('ab,' * 1000).split(',')[:1000]|max(attribute=path) if path else '' }}"
    "{% if said == 'long' %}{{ 'a' * 10**10 }}{% endif %}"
    "{% if said == 'loops' %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
)
LIMITS = TemplateLimits(seconds=1.0, grace=0.5, memory=128 * 2**20)
COSTS = {
    "huge": "the chat template",
    "long": "makes a text",
    "slow": "took over",
    "loops": "took over",
}
"""What a message may make it do, and the refusal: memory may also cost too much time first."""
PATIENCE = 60


def test_what_the_template_refuses_is_told_in_its_words(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        body = {"messages": [{"role": "system", "content": "x"}], "max_tokens": 1}
        for path, fields in ((CHAT, {}), (CHAT, {"stream": True}), ("/tokenize", {})):
            answer = await lab.post(path, {**body, **fields})
            answer.check_refused()
            assert answer.error["param"] == "messages"
            assert "no system message here; put it first" in answer.error["message"]

    run_lively(test, template=REFUSING)


def test_a_template_that_takes_too_much_fails_its_request_alone(run_lively: RunLab) -> None:
    """In a process of its own, which is replaced when it has to be ended."""

    async def test(lab: Lab) -> None:
        for said, reason in COSTS.items():
            answer = await lab.chat(said)
            answer.check_refused()
            assert answer.error["param"] == "messages"
            assert reason in answer.error["message"]
            assert (await lab.chat("hello", max_tokens=2)).status == 200
        body = {"messages": [{"role": "user", "content": "long"}]}
        (await lab.post("/tokenize", body)).check_refused()

    run_lively(
        test,
        template=COSTLY,
        renderer=lambda source, tokens: IsolatedTemplate(source, tokens, LIMITS),
    )


@pytest.mark.skipif(sys.platform == "win32", reason="stops a process")
def test_a_render_that_hangs_holds_up_nobody(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        (process,) = lab.llm.tokenizer._template._idle
        os.kill(process.pid, signal.SIGSTOP)
        waits = asyncio.ensure_future(lab.chat("hangs", max_tokens=1))
        while lab.llm.tokenizer._template._idle:
            await asyncio.sleep(0.001)
        others = await asyncio.gather(*(lab.chat("hello", max_tokens=2) for _ in range(3)))
        assert [answer.status for answer in others] == [200] * 3
        assert not waits.done()
        os.kill(process.pid, signal.SIGKILL)
        (await waits).check_refused()

    limits = TemplateLimits(seconds=PATIENCE)
    run_lively(test, renderer=lambda source, tokens: IsolatedTemplate(source, tokens, limits))
