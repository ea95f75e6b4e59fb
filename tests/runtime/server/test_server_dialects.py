"""Fields as other servers' clients write them: honoured or refused, never passed over."""

from collections.abc import Callable
from typing import Any

import pytest

RunLab = Callable[..., None]


def test_a_schema_beside_json_object_is_kept_to(run_lab: RunLab) -> None:
    async def test(lab: Any) -> None:
        asked: dict[str, Any] = {"type": "json_object", "schema": {"const": "4b"}}
        answer = await lab.chat("x", response_format=asked, max_tokens=10)
        assert answer.json()["choices"][0]["message"]["content"] == '"4b"'
        for schema in (123, {"type": 123}, {"type": "hiccup"}):
            asked = {"type": "json_object", "schema": schema}
            answer = await lab.chat("x", response_format=asked)
            assert (answer.status, answer.error["param"]) == (400, "response_format")

    run_lab(test)


def test_structured_outputs_may_ask_for_any_object(run_lab: RunLab) -> None:
    async def test(lab: Any) -> None:
        answer = await lab.complete(structured_outputs={"json_object": True}, max_tokens=20)
        assert answer.json()["choices"][0]["text"].startswith("{")
        answer = await lab.complete(structured_outputs={"json_object": False})
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs")

    run_lab(test)


@pytest.mark.parametrize("name", ["grammar", "structural_tag"])
def test_structured_outputs_of_other_kinds_are_refused(run_lab: RunLab, name: str) -> None:
    async def test(lab: Any) -> None:
        asked = {"choice": ["a"], name: "root ::= 'b'"}
        answer = await lab.complete(structured_outputs=asked)
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
        answer = await lab.complete(structured_outputs={"choice": ["a"], name: None})
        assert answer.json()["choices"][0]["text"] == "a"

    run_lab(test)


@pytest.mark.parametrize("count", [0, 1])
def test_the_taken_token_is_among_the_likeliest(run_lab: RunLab, count: int) -> None:
    """OpenAI: "there may be up to logprobs+1 elements", since the sampled token is always one."""

    async def test(lab: Any) -> None:
        answer = await lab.complete(logprobs=count, temperature=2, seed=3, max_tokens=20)
        scores = answer.json()["choices"][0]["logprobs"]
        assert len(scores["tokens"]) > 4
        for token, score, top in zip(
            scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
        ):
            assert top[token] == score
            assert max(count, 1) <= len(top) <= count + 1

    run_lab(test)


def test_a_refused_field_keeps_its_name(run_lab: RunLab) -> None:
    """The engine knows the scores that echo asks for as prompt_logprobs too."""

    async def test(lab: Any) -> None:
        answer = await lab.complete(prompt_logprobs=1)
        assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")
        assert answer.error["message"].startswith("prompt_logprobs: not supported")

    run_lab(test)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True),
        ("logprob_token_ids", [1]),
        ("truncation_side", "left"),
        ("kv_transfer_params", {}),
        ("return_tokens_as_token_ids", True),
    ],
)
def test_fields_of_vllm_are_refused_by_name(run_lab: RunLab, name: str, value: Any) -> None:
    async def test(lab: Any) -> None:
        answer = await lab.chat("x", **{name: value})
        assert (answer.status, answer.error["param"]) == (400, name)
        assert (await lab.chat("x", max_tokens=1, **{name: None})).status == 200

    run_lab(test)


def test_tools_are_part_of_a_tokenized_conversation(run_lab: RunLab) -> None:
    async def test(lab: Any) -> None:
        body = {
            "messages": [{"role": "user", "content": "ab"}],
            "tools": [{"type": "function", "function": {"name": "tool"}}],
        }
        made = (await lab.post("/tokenize", body)).json()
        assert made["tokens"] == lab.llm.tokenizer.encode("abtool")
        assert made["token_strs"] is None

    run_lab(test)


def test_a_chunk_with_the_role_alone_counts_no_token(run_lab: RunLab) -> None:
    async def test(lab: Any) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await lab.chat("abc", stream=True, stream_options=options, max_tokens=3, n=2)
        chunks = answer.events()[:-1]
        for chunk in chunks[:2]:
            assert chunk["choices"][0]["delta"]["role"] == "assistant"
            assert (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) == (3, 0)
        assert chunks[2]["usage"]["completion_tokens"] > 0
        assert chunks[-1]["usage"]["completion_tokens"] == 6

    run_lab(test)


def test_token_strs_are_spelled_as_in_the_vocabulary(run_lab: RunLab) -> None:
    async def test(lab: Any) -> None:
        body = {"prompt": "a é", "return_token_strs": True}
        made = (await lab.post("/tokenize", body)).json()
        assert made["token_strs"] == ["a", "Ġ", "Ã", "©"]

    run_lab(test)


@pytest.mark.parametrize("best_of", [1, 2, 3])
def test_choices_are_not_chosen_among_others(run_lab: RunLab, best_of: int) -> None:
    async def test(lab: Any) -> None:
        for answer in (
            await lab.complete(n=2, best_of=best_of),
            await lab.chat(n=2, best_of=best_of),
        ):
            assert (answer.status, answer.error["param"]) == (400, "best_of")
        for fields in ({"n": 2, "best_of": None}, {"n": 1, "best_of": 1}, {"best_of": 1}):
            assert (await lab.complete(max_tokens=1, **fields)).status == 200

    run_lab(test)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_a_length_is_refused_under_the_name_it_was_sent_by(
    run_lab: RunLab, path: str, name: str
) -> None:
    start = {"messages": [{"role": "user", "content": "ab"}], "prompt": "ab", "input": "ab"}
    body = {k: v for k, v in start.items() if path != "/v1/responses" or k == "input"}
    if path == "/v1/completions":
        body = {"prompt": "ab"}

    async def test(lab: Any) -> None:
        for stream in (False, True):
            answer = await lab.post(path, {**body, name: 1000, "stream": stream})
            answer.check_refused()
            assert answer.error["param"] == name
            assert (
                f"+ {name} 1000 = 1002; shorten the prompt or lower {name}"
                in (answer.error["message"])
            )
        answer = await lab.post(path, {**body, name: 0, "min_tokens": 1})
        assert answer.error["param"] == name
        answer = await lab.post(path, {**body, name: 2, "min_tokens": 3})
        assert answer.error["param"] == "min_tokens"
        assert answer.error["message"] == f"min_tokens: 3 is more than {name} 2"

    run_lab(test)


def test_of_two_lengths_the_wrong_one_is_named(run_lab: RunLab) -> None:
    async def test(lab: Any) -> None:
        answer = await lab.chat(max_tokens=-1, max_completion_tokens=5)
        assert answer.error["param"] == "max_tokens"
        assert answer.error["message"].startswith("max_tokens: ")
        answer = await lab.chat(max_tokens=5, max_completion_tokens=1000)
        assert answer.error["param"] == "max_completion_tokens"

    run_lab(test)


PROMPTS = "a string, a list of strings, a list of token ids, or a list of such lists"


@pytest.mark.parametrize(
    ("path", "field", "value", "told"),
    [
        ("/v1/completions", "prompt", 5, f"prompt: Input should be {PROMPTS}"),
        ("/v1/completions", "prompt", {"a": 1}, f"prompt: Input should be {PROMPTS}"),
        ("/v1/completions", "prompt", ["a", 1], f"prompt: Input should be {PROMPTS}"),
        ("/v1/completions", "prompt", [True], f"prompt: Input should be {PROMPTS}"),
        ("/v1/completions", "prompt", [[1], "a"], f"prompt: Input should be {PROMPTS}"),
        ("/v1/completions", "prompt", [1, -1], "prompt.1: Input should be greater than or eq"),
        ("/v1/completions", "prompt", [[1], ["a"]], "prompt.1.0: Input should be a valid int"),
        ("/v1/chat/completions", "stop", 5, "stop: Input should be a string or a list of str"),
        ("/v1/chat/completions", "stop", ["a", 5], "stop.1: Input should be a valid string"),
        ("/v1/chat/completions", "guided_json", [], "guided_json: Input should be an object, or"),
        ("/v1/chat/completions", "tool_choice", 5, "tool_choice: Input should be 'none', 'auto', "),
        ("/v1/chat/completions", "tool_choice", "x", "tool_choice: Input should be 'none', 'auto'"),
        (
            "/v1/chat/completions",
            "tool_choice",
            {"type": "function", "function": {}},
            "tool_choice.function.name: Field required",
        ),
        ("/v1/responses", "input", 5, "input: Input should be a string or a list of items"),
        ("/v1/responses", "input", [{"role": "user"}], "input.0.content: Field required"),
        ("/v1/responses", "input", [{"content": "a"}], "input.0.role: Field required"),
        (
            "/v1/responses",
            "input",
            [{"role": "user", "content": 5}],
            "input.0.content: Input should be a string or a list of parts",
        ),
        ("/v1/responses", "tool_choice", [], "tool_choice: Input should be 'none', 'auto', 'req"),
    ],
)
def test_of_several_forms_all_or_the_one_meant_is_told(
    run_lab: RunLab, path: str, field: str, value: Any, told: str
) -> None:
    messages = [{"role": "user", "content": "a"}]
    start = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    body = start.get(path, {"messages": messages})

    async def test(lab: Any) -> None:
        answer = await lab.post(path, {**body, field: value})
        answer.check_refused()
        assert answer.error["message"].startswith(told)
        assert answer.error["param"] == field

    run_lab(test)
