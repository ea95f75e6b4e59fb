"""The openai package against a server on a socket: what it reads is what the engine made."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.service import ModelCard

Site = Any  # of conftest.py, which cannot be imported
RunSite = Callable[..., None]

HELLO: Any = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": "fake", "temperature": 0, "max_tokens": 12}
HERMES = ModelCard(("fake",), 0, "fp", tool_format=TOOL_FORMATS["hermes"])


class Flag(BaseModel):
    """Waves."""

    x: bool


def client_of(site: Site, **options: Any) -> AsyncOpenAI:
    given: dict[str, Any] = {"api_key": site.key, "max_retries": 0, **options}
    return AsyncOpenAI(base_url=f"{site.url}/v1", **given)


async def text_of(site: Site, **params: Any) -> str:
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, **params}
    made = await site.llm.generate("hello", SamplingParams(**given))
    text: str = made.outputs[0].text
    return text


def test_answers_are_the_engines(run_site: RunSite) -> None:
    async def test(site: Site) -> None:
        want = await text_of(site)
        async with client_of(site) as client:
            names = [model.id async for model in client.models.list()]
            assert names == ["fake", "alias/two"]
            assert (await client.models.retrieve("alias/two")).id == "alias/two"
            made = await client.chat.completions.create(messages=HELLO, **GREEDY)
            assert made.choices[0].message.content == want
            assert made.usage is not None
            usage = made.usage
            assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
            assert made._request_id
            text = await client.completions.create(prompt="hello", **GREEDY)
            assert text.choices[0].text == want

    run_site(test)


def test_streams_add_up(run_site: RunSite) -> None:
    async def test(site: Site) -> None:
        want = await text_of(site)
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        async with client_of(site) as client:
            whole = await client.chat.completions.create(messages=HELLO, **GREEDY)
            stream = await client.chat.completions.create(messages=HELLO, **GREEDY, **options)
            *parts, last = [chunk async for chunk in stream]
            assert "".join(part.choices[0].delta.content or "" for part in parts) == want
            assert last.usage.total_tokens == whole.usage.total_tokens
            # The helper takes an answer that was cut short for a failure.
            ended = {**GREEDY, "stop": [want[4]]}
            async with client.chat.completions.stream(messages=HELLO, **ended) as helper:
                final = await helper.get_final_completion()
            assert final.choices[0].message.content == want[: want.index(want[4])]
            assert final.choices[0].finish_reason == "stop"
            stream = await client.completions.create(prompt="hello", **GREEDY, stream=True)
            assert "".join([part.choices[0].text async for part in stream]) == want

    run_site(test)


def test_scores_are_read(run_site: RunSite) -> None:
    async def test(site: Site) -> None:
        bias = {str(token): -100 for token in site.llm.tokenizer.encode("é😀")}
        async with client_of(site) as client:
            made = await client.chat.completions.create(
                messages=HELLO, **GREEDY, logprobs=True, top_logprobs=2, logit_bias=bias
            )
            scored = made.choices[0].logprobs.content
            assert "".join(token.token for token in scored) == made.choices[0].message.content
            assert {len(token.top_logprobs) for token in scored} == {2}
            assert {token.top_logprobs[0].token == token.token for token in scored} == {True}
            prompt = await client.completions.create(
                **{**GREEDY, "max_tokens": 0}, prompt="hello", echo=True, logprobs=1
            )
            scores = prompt.choices[0].logprobs
            assert "".join(scores.tokens) == prompt.choices[0].text == "hello"
            assert scores.token_logprobs[0] is None

    run_site(test)


def test_objects_and_tools_are_parsed(run_site: RunSite) -> None:
    """The fake model takes any way through a grammar: some seed ends within the context."""

    async def parsed(client: AsyncOpenAI, seed: int, **fields: Any) -> Any:
        try:
            made = await client.chat.completions.parse(
                model="fake", messages=[{"role": "user", "content": "a"}], seed=seed, **fields
            )
        except openai.LengthFinishReasonError:
            return None
        message = made.choices[0].message
        if message.tool_calls:
            return message.tool_calls[0].function.parsed_arguments
        return message.parsed

    async def test(site: Site) -> None:
        tool = openai.pydantic_function_tool(Flag)
        async with client_of(site) as client:
            forms: list[dict[str, Any]] = [
                {"response_format": Flag},
                {"tools": [tool], "tool_choice": "required"},
            ]
            for fields in forms:
                found = [await parsed(client, seed, **fields) for seed in range(4)]
                assert {type(each) for each in found} <= {Flag, type(None)}
                assert any(isinstance(each, Flag) for each in found), fields

    run_site(test, of=HERMES, room=256)


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"top_p": 7}, openai.BadRequestError, None, "top_p"),
        ({"model": "gpt-x"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"messages": [{"role": "user", "content": "x" * 70}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        (
            {"extra_body": {"best_of": 2}},
            openai.BadRequestError,
            "unsupported_parameter",
            "best_of",
        ),
    ],
)
def test_refusals_are_the_right_exceptions(
    run_site: RunSite,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    code: str | None,
    param: str,
) -> None:
    async def test(site: Site) -> None:
        seen: list[int] = []

        async def heard(response: Any) -> None:
            seen.append(response.status_code)

        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [heard]})
        async with client_of(site, max_retries=2, http_client=http) as client:
            with pytest.raises(kind) as caught:
                await client.chat.completions.create(**{"messages": HELLO, **GREEDY, **fields})
        assert (caught.value.code, caught.value.param) == (code, param)
        assert len(seen) == 1, "nothing is tried again that cannot work"

    run_site(test)


def test_a_wrong_key_is_an_authentication_error(run_site: RunSite) -> None:
    async def test(site: Site) -> None:
        async with client_of(site, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
        assert caught.value.code == "invalid_api_key"

    run_site(test)


def test_a_full_server_is_tried_again(run_site: RunSite) -> None:
    """The client sees 503, waits as told, and is served once there is room."""

    async def test(site: Site) -> None:
        seen: list[int] = []
        async with client_of(site) as other:
            filling = asyncio.ensure_future(
                other.completions.create(model="fake", prompt="a", n=3, max_tokens=40)
            )
            await asyncio.to_thread(site.session.entered.wait)

            async def heard(response: Any) -> None:
                seen.append(response.status_code)
                filling.cancel()
                site.session.permits.release(1_000)

            http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [heard]})
            async with client_of(site, max_retries=2, http_client=http) as client:
                made = await client.chat.completions.create(messages=HELLO, **GREEDY)
            assert seen == [503, 200]
            assert made.choices[0].message.content == await text_of(site)
            with pytest.raises(asyncio.CancelledError):
                await filling

    run_site(test, is_open=False, max_queue=0)


def test_what_came_over_the_wire_is_what_plain_http_gets(run_site: RunSite) -> None:

    async def test(site: Site) -> None:
        async with client_of(site) as client:
            made = await client.models.with_raw_response.list()
        assert made.headers["x-request-id"]
        headers = {"authorization": f"Bearer {site.key}"}
        async with httpx.AsyncClient(base_url=site.url, headers=headers) as plain:
            assert (await plain.get("/v1/models")).json() == made.http_response.json()

    run_site(test)
