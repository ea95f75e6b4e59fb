"""The langchain-openai package: chat models, text models, tools and forms."""

import asyncio
from typing import Any, Literal

import openai
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target


class ShowCity(BaseModel):
    """Shows a city."""

    city: Literal["Paris", "London", "Rome"]
    large: bool


def _model(target: Target, **options: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 32, "max_retries": 0, "api_key": target.key, **options}
    return ChatOpenAI(base_url=target.base, model=target.model, **given)


def invoke(target: Target) -> None:
    made = _model(target).invoke(raw.QUESTION)
    assert made.content == raw.chat_text(target)
    usage = made.usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert made.response_metadata["finish_reason"] in ("stop", "length")


def messages_of_several_roles(target: Target) -> None:
    messages = [("system", "Answer in French."), ("human", raw.QUESTION)]
    body = {
        "messages": [{"role": "system", "content": "Answer in French."}, *raw.conversation()],
        **{"temperature": 0, "max_tokens": 32},
    }
    want = raw.ask(target, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert _model(target).invoke(messages).content == want


def stream(target: Target) -> None:
    parts = list(_model(target, stream_usage=True).stream(raw.QUESTION))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    want = raw.chat(target)
    assert len(parts) > 2
    assert whole.content == want["choices"][0]["message"]["content"]
    assert whole.usage_metadata["total_tokens"] == want["usage"]["total_tokens"]


def batch(target: Target) -> None:
    texts = [f"What is {a} plus {a}?" for a in range(4)]
    model = _model(target, max_tokens=12)
    want = raw.chat_texts(target, texts, max_tokens=12)
    assert [made.content for made in model.batch(texts)] == want

    async def main() -> list[Any]:
        return list(await model.abatch(texts))

    assert [made.content for made in asyncio.run(main())] == want


def logprobs(target: Target) -> None:
    made = _model(target, max_tokens=6).bind(logprobs=True, top_logprobs=2).invoke(raw.QUESTION)
    scored = made.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in scored) == made.content
    assert {len(token["top_logprobs"]) for token in scored} == {2}


def tools(target: Target) -> None:
    model = _model(target, max_tokens=64).bind_tools([ShowCity], tool_choice="ShowCity")
    made = model.invoke(raw.QUESTION)
    (call,) = made.tool_calls
    assert call["name"] == "ShowCity"
    ShowCity.model_validate(call["args"])
    whole = None
    for part in model.stream(raw.QUESTION):
        whole = part if whole is None else whole + part
    assert whole is not None
    assert [c["args"] for c in whole.tool_calls] == [call["args"]]


def structured_output(target: Target) -> None:
    for method in ("json_schema", "function_calling"):
        model = _model(target, max_tokens=64).with_structured_output(ShowCity, method=method)
        assert isinstance(model.invoke("Paris is a large city."), ShowCity)


def text_model(target: Target) -> None:
    prompt = "The capital of France is"
    model = OpenAI(
        base_url=target.base, api_key=target.key, model=target.model, temperature=0, max_tokens=8
    )
    want = raw.complete(target, prompt, max_tokens=8)["choices"][0]["text"]
    assert model.invoke(prompt) == want
    assert "".join(model.stream(prompt)) == want


def errors(target: Target) -> None:
    for options, text, kind in (
        ({"api_key": "wrong"}, "x", openai.AuthenticationError),
        ({"top_p": 7}, "x", openai.BadRequestError),
        ({}, raw.too_long(target), openai.BadRequestError),
    ):
        try:
            _model(target, **options).invoke(text)
        except kind:
            continue
        raise AssertionError(f"{options} was taken")
