"""Python's own http.client: the contract without any library in between."""

import json

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target


def models_are_listed(target: Target) -> None:
    listed = raw.ask(target, "/v1/models").json()
    assert target.model in [model["id"] for model in listed["data"]]
    assert raw.ask(target, f"/v1/models/{target.model}").json()["id"] == target.model


def a_stream_is_the_answer_in_parts(target: Target) -> None:
    whole = raw.chat(target)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"messages": raw.conversation(), "temperature": 0, "max_tokens": 32, **options}
    answer = raw.ask(target, "/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *frames, done, rest = answer.data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    parts = [choice for event in events for choice in event["choices"]]
    text = "".join(part["delta"].get("content") or "" for part in parts)
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [part["finish_reason"] for part in parts if part["finish_reason"]]
    assert reasons == [whole["choices"][0]["finish_reason"]]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-1]["usage"][name] for name in counts] == [whole["usage"][n] for n in counts]


def a_key_is_needed(target: Target) -> None:
    answer = raw.ask(target, "/v1/models", key="wrong")
    assert answer.status == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def a_request_id_comes_with_every_answer(target: Target) -> None:
    ids = {raw.ask(target, path).headers["x-request-id"] for path in ("/v1/models", "/none")}
    assert len(ids) == 2


def a_full_queue_is_told(target: Target) -> None:
    with raw.full_queue(target):
        body = {"messages": raw.conversation(), "max_tokens": 1}
        answer = raw.ask(target, "/v1/chat/completions", body)
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "queue_full"
    assert raw.chat_text(target)
