"""The anthropic package against a server on a socket: what it reads is what the engine made."""

from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from trtllm_lite.runtime.sampling_params import SamplingParams

Site = Any  # of conftest.py, which cannot be imported
RunSite = Callable[..., None]

GREEDY: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "hello"}],
    "extra_body": {"temperature": 0},
}


def client_of(site: Site, **options: Any) -> AsyncAnthropic:
    given: dict[str, Any] = {"api_key": site.key, "max_retries": 0, **options}
    return AsyncAnthropic(base_url=site.url, **given)


async def text_of(site: Site) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    made = await site.llm.generate("hello", params)
    text: str = made.outputs[0].text
    return text


def test_messages_are_the_engines(run_site: RunSite) -> None:
    async def test(site: Site) -> None:
        want = await text_of(site)
        async with client_of(site) as client:
            made = await client.messages.create(**GREEDY)
            assert "".join(block.text for block in made.content) == want
            assert made.stop_reason in ("end_turn", "max_tokens")
            async with client.messages.stream(**GREEDY) as stream:
                text = "".join([part async for part in stream.text_stream])
                final = await stream.get_final_message()
            assert text == want
            assert final.usage.output_tokens == made.usage.output_tokens
            given = {name: GREEDY[name] for name in ("model", "messages")}
            counted = await client.messages.count_tokens(**given)
            cached = made.usage.cache_read_input_tokens
            assert counted.input_tokens == made.usage.input_tokens + cached == 5

    run_site(test)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "claude-x"}, anthropic.NotFoundError),
        ({"extra_body": {"top_p": 7}}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "x" * 70}]}, anthropic.BadRequestError),
    ],
)
def test_refusals_are_the_right_exceptions(
    run_site: RunSite, fields: dict[str, Any], kind: type[Exception]
) -> None:
    async def test(site: Site) -> None:
        async with client_of(site) as client:
            with pytest.raises(kind):
                await client.messages.create(**{**GREEDY, **fields})
        async with client_of(site, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**GREEDY)

    run_site(test)
