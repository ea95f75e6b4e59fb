"""/openapi.json and the server are of one mind: about requests, and about replies."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from trtllm_lite.runtime.server.app import create_app
from trtllm_lite.runtime.server.openapi_document import document
from trtllm_lite.runtime.server.openapi_operations import OPERATIONS
from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import Limits, ServerConfig

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

TOOLS = ModelCard(("fake",), 0, "fp", tool_format=TOOL_FORMATS["hermes"])
HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
ROOM = 800
CONFIG = ServerConfig()
DOCUMENT = document(create_app(Service(CONFIG), "9.9").routes, CONFIG, "9.9")


def inside(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in JSON data."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from inside(item)


def validator(schema: Any, made: dict[str, Any] = DOCUMENT) -> Any:
    """For a schema of the document."""
    return jsonschema.Draft202012Validator({**schema, "components": made["components"]})


def body_schema(path: str) -> Any:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    return content["application/json"]["schema"]


def closed(made: dict[str, Any]) -> dict[str, Any]:
    """The document with no room for fields that it does not name."""
    copy: dict[str, Any] = json.loads(json.dumps(made))
    for schema in inside(copy["components"]["schemas"]):
        if isinstance(schema.get("properties"), dict):
            schema.setdefault("additionalProperties", False)
    return copy


CLOSED = closed(DOCUMENT)


def check_reply(method: str, path: str, status: int, reply: Any, kind: str = "json") -> None:
    """A reply against the document, in which no field of the reply may be missing."""
    entry = CLOSED["paths"][path][method]["responses"][str(status)]
    if "$ref" in entry:
        entry = CLOSED["components"]["responses"][entry["$ref"].rsplit("/", 1)[1]]
    content = entry["content"]
    schema = content["application/json"]["schema"] if kind == "json" else event_schema(content)
    validator(schema, CLOSED).validate(reply)


def event_schema(content: Any) -> Any:
    """Of the JSON in an event."""
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    return next(each for each in data.get("anyOf", [data]) if "contentSchema" in each)[
        "contentSchema"
    ]


def schema_format(**extra: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}} | extra


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "go", **function}}


Case = tuple[str, dict[str, Any], bool]


def bads(path: str, field: str, *values: Any) -> list[Case]:
    return [(path, {field: value}, False) for value in values]


CASES: list[Case] = [
    (CHAT, {}, True),
    (CHAT, {"n": 2, "temperature": 2, "top_p": 1, "top_k": -1, "min_p": 0, "seed": -5}, True),
    *bads(CHAT, "n", 0, 129, 1.5, "1", True),
    *bads(CHAT, "temperature", -0.1, 2.1, "1", True),
    (CHAT, {"top_p": 0}, False),
    (CHAT, {"repetition_penalty": 0}, False),
    (CHAT, {"seed": 2**63}, False),
    (CHAT, {"stop": ["a"] * 16, "max_tokens": 1}, True),
    *bads(CHAT, "stop", "", [""], ["a"] * 17, 5, {}),
    (CHAT, {"logit_bias": {"3": 100, "4": -100}}, True),
    *bads(CHAT, "logit_bias", {"x": 1}, {"-1": 1}, {"1": 101}, {"": 1}, []),
    (CHAT, {"messages": []}, False),
    (CHAT, {"messages": [{"role": "user", "content": []}, *HI]}, True),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
    (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, True),
    *(
        (CHAT, {"messages": [message]}, False)
        for message in (
            {},
            {"role": "user"},
            {"role": "user", "content": None},
            {"role": "user", "content": 5},
            {"role": "wizard", "content": "a"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "user", "content": [{"type": "text"}]},
            {"role": "user", "content": "a", "tool_calls": {}},
            {"role": "assistant", "content": None},
            {"role": "assistant", "tool_calls": []},
            "hi",
        )
    ),
    (CHAT, {"guided_choice": ["a", "b"]}, True),
    *bads(CHAT, "guided_choice", [], [""], "a"),
    (CHAT, {"guided_regex": ""}, False),
    (CHAT, {"structured_outputs": {"regex": ""}}, False),
    (CHAT, {"response_format": schema_format()}, True),
    (CHAT, {"response_format": {"type": "text"}}, True),
    (CHAT, {"response_format": {"type": "json_schema"}}, False),
    (CHAT, {"response_format": schema_format(type="hiccup")}, False),
    (CHAT, {"response_format": schema_format(json_schema={"name": "x"})}, False),
    (CHAT, {"tools": [tool(), tool(name="b.c-d_9", parameters={"type": "object"})]}, True),
    (CHAT, {"tools": []}, False),
    (CHAT, {"tools": [tool(name="a b")]}, False),
    (CHAT, {"tools": [tool(parameters={"type": "array"})]}, False),
    (CHAT, {"tools": [tool()], "tool_choice": "maybe"}, False),
    (CHAT, {"best_of": 1, "use_beam_search": False, "suffix": "", "audio": None}, True),
    *bads(CHAT, "best_of", 2, True, "1"),
    (CHAT, {"best_of": 1, "n": 2}, False),
    (CHAT, {"best_of": None, "n": 2}, True),
    (COMPLETIONS, {"best_of": 1, "n": 2}, False),
    (COMPLETIONS, {"best_of": 1, "n": 1}, True),
    (CHAT, {"modalities": ["audio"]}, False),
    (CHAT, {"user": 5, "metadata": {"a": 1}, "something_new": [1]}, True),
    (COMPLETIONS, {}, True),
    (COMPLETIONS, {"prompt": ["a", "b"]}, True),
    (COMPLETIONS, {"prompt": [3, 4]}, True),
    (COMPLETIONS, {"prompt": [[3], [4]]}, True),
    *bads(COMPLETIONS, "prompt", "", [], [""], [[]], [-1], [True], ["a", 1], [2**63], None, 5),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, False),
    (COMPLETIONS, {"max_tokens": -1}, False),
    (COMPLETIONS, {"logprobs": 21}, False),
    (COMPLETIONS, {"suffix": "x"}, False),
    (RESPONSES, {}, True),
    (RESPONSES, {"store": False, "truncation": "disabled", "stop": ["x"]}, True),
    *bads(RESPONSES, "input", [], None, 5, [{"role": "wizard"}]),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "null"}}}}, True),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, False),
    (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, False),
    (RESPONSES, {"store": True}, False),
    (RESPONSES, {"stop": ["a"] * 17}, False),
    (MESSAGES, {}, True),
    (MESSAGES, {"max_tokens": None}, False),
    (MESSAGES, {"temperature": 1.5}, False),
    (MESSAGES, {"stop_sequences": [""]}, False),
    (MESSAGES, {"tools": [{"name": "a b", "input_schema": {}}]}, False),
    (MESSAGES, {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, False),
    (MESSAGES, {"metadata": {"user_id": "x"}, "service_tier": "auto"}, True),
    (COUNT_TOKENS, {"tools": [{"name": "a", "input_schema": {"type": "object"}}]}, True),
    (COUNT_TOKENS, {"messages": []}, False),
    ("/tokenize", {"prompt": "a"}, True),
    ("/tokenize", {"prompt": 5}, False),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, False),
    ("/detokenize", {"tokens": [1, 2]}, True),
    ("/detokenize", {"tokens": [-1]}, False),
    ("/detokenize", {}, False),
]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
    MESSAGES: {"messages": HI, "max_tokens": 1},
    COUNT_TOKENS: {"messages": HI},
}


def test_the_document_and_the_server_are_of_one_mind(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for path, fields, good in CASES:
            body = {**NEEDED.get(path, {}), **fields}
            assert validator(body_schema(path)).is_valid(body) is good, (path, fields)
            answer = await lab.post(path, body)
            assert answer.status == (200 if good else 400), (path, fields, answer.body)
            check_reply("post", path, answer.status, answer.json())

    run_lab(test, room=ROOM, card=TOOLS)


def examples() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, entry in DOCUMENT["paths"].items():
        content = entry.get("post", {}).get("requestBody", {}).get("content", {})
        for name, each in content.get("application/json", {}).get("examples", {}).items():
            yield path, name, each["value"]


def test_examples_are_accepted(run_lab: RunLab) -> None:
    found = list(examples())
    assert {path for path, *_ in found} == {e.path for e in OPERATIONS if e.body is not None}
    for path, _, body in found:
        validator(body_schema(path)).validate(body)

    async def test(lab: Lab) -> None:
        for path, name, body in found:
            answer = await lab.post(path, body)
            assert answer.status == 200, (path, name, answer.body)
            if not body.get("stream"):
                check_reply("post", path, 200, answer.json())

    run_lab(test, room=ROOM, card=TOOLS)


STREAMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": HI, "tools": [tool()], "tool_choice": "required"}),
    (COMPLETIONS, {"prompt": "hi", "echo": True, "logprobs": 1}),
]
RESPONSE_TOOL = {"type": "function", "name": "go"}
MESSAGE_TOOL = {"name": "go", "input_schema": {"type": "object"}}
WHOLE: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    (RESPONSES, {"tools": [RESPONSE_TOOL], "tool_choice": "required", "metadata": {"a": "b"}}),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}, "reasoning": {"summary": "auto"}}),
    (MESSAGES, {"stop_sequences": ["a", "e"]}),
    (MESSAGES, {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 40}),
    (COUNT_TOKENS, {}),
]


def test_other_apis_answer_what_the_document_says_and_nothing_else(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for path, fields in WHOLE:
            answer = await lab.post(path, {**NEEDED[path], **fields})
            assert answer.status == 200, (path, fields, answer.body)
            check_reply("post", path, 200, answer.json())
        for method in ("get", "post", "delete"):
            answer = await lab.start(method.upper(), f"{RESPONSES}/resp_1").whole()
            check_reply(method, f"{RESPONSES}/{{id}}", answer.status, answer.json())
        large = await lab.start("POST", MESSAGES, chunks=[b"{"]).whole()
        check_reply("post", MESSAGES, large.status, large.json())

    run_lab(test, room=ROOM, card=TOOLS)


def test_what_no_schema_tells_is_told_in_words(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
        answer = await lab.post(RESPONSES, {"input": [thought]})
        assert (answer.status, answer.error["param"]) == (400, "input")
        assert "reasoning alone" in answer.error["message"]

    run_lab(test)


def test_named_events_are_of_the_types_of_the_document(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for path in (RESPONSES, MESSAGES):
            answer = await lab.post(path, {**NEEDED[path], "stream": True})
            lines = answer.body.decode().splitlines()
            events = [json.loads(x.removeprefix("data: ")) for x in lines if x.startswith("data:")]
            schema = event_schema(DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"])
            assert len(events) > 4
            for event in events:
                validator(schema).validate(event)

    run_lab(test, room=ROOM, card=TOOLS)


@pytest.mark.parametrize(("path", "fields"), STREAMS)
def test_replies_hold_what_the_document_says_and_nothing_else(
    run_lab: RunLab, path: str, fields: dict[str, Any]
) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}

    async def test(lab: Lab) -> None:
        body = {**fields, "max_tokens": 40}
        whole = await lab.post(path, body)
        check_reply("post", path, 200, whole.json())
        for options in (None, {"include_usage": True}, usage):
            answer = await lab.post(path, {**body, "stream": True, "stream_options": options})
            events = answer.events()
            assert len(events) > 2
            for event in events[:-1]:
                check_reply("post", path, 200, event, "events")

    run_lab(test, room=ROOM, card=TOOLS)


def test_facts_hold_what_the_document_says_and_nothing_else(run_lab: RunLab) -> None:
    paths = [each.path for each in OPERATIONS if each.method == "GET" and each.reply is not None]
    assert len(paths) > 6

    async def ready(lab: Lab) -> None:
        for path in paths:
            answer = await lab.get(path.replace("{id}", "fake"))
            check_reply("get", path, 200, answer.json())
        answer = await lab.get("/v1/models/none")
        check_reply("get", "/v1/models/{id}", 404, answer.json())

    async def loading(lab: Lab) -> None:
        for path in paths:
            answer = await lab.get(path.replace("{id}", "fake"))
            check_reply("get", path, answer.status, answer.json())
            assert answer.status == (200 if path == "/live" else 503)

    run_lab(ready)
    run_lab(loading, loaded=False)


def test_capabilities_name_the_fields_of_the_document(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        made = (await lab.get("/v1/capabilities")).json()["endpoints"]
        assert set(made) == {CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS}
        for path, rows in made.items():
            name = body_schema(path)["$ref"].rsplit("/", 1)[1]
            properties = DOCUMENT["components"]["schemas"][name]["properties"]
            assert set(rows) == set(properties)
            refused = {field for field, row in rows.items() if row["status"] == "refused"}
            assert refused == {field for field, each in properties.items() if "deprecated" in each}

    run_lab(test, card=TOOLS)


def test_errors_have_the_statuses_of_the_document(run_lab: RunLab) -> None:
    config = ServerConfig(limits=Limits(body_bytes=50))

    async def test(lab: Lab) -> None:
        large = await lab.post(CHAT, {"messages": HI * 10})
        check_reply("post", CHAT, large.status, large.json())
        many = await lab.get("/v1/models", {f"x-{i}": "1" for i in range(200)})
        check_reply("get", "/v1/models", many.status, many.json())
        other = await lab.post(CHAT, {"model": "none", "messages": []})
        check_reply("post", CHAT, other.status, other.json())
        assert (large.status, many.status, other.status) == (413, 431, 400)

    run_lab(test, config)
