"""Bodies, prompts and numbers, rightly and wrongly, through the whole server: cases 1 to 15 of
docs/robustness.md. After each of them the server answers as before."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.server.settings import Limits, ServerConfig

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
MIB = 2**20


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_what_is_no_json_object_is_400(run_lively: RunLab, path: str) -> None:
    bodies = [
        *(b'{"messages": [', b"", b"[]", b"1", b"null", b'"x"', b"{} {}", b"\xff\xfe{}"),
        *(b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}'),
        *(b'{"max_tokens": NaN}', b'{"max_tokens": Infinity}', b'{"max_tokens": 1e999}'),
    ]

    async def test(lab: Lab) -> None:
        for body in bodies:
            (await lab.start("POST", path, chunks=[body]).whole()).check_refused()

    run_lively(test)


def test_the_last_of_duplicate_keys_wins_and_unknown_ones_pass(run_lively: RunLab) -> None:
    body = b'{"prompt": 5, "future": {"x": [1]}, "max_tokens": 9, "max_tokens": 2, "prompt": "ab"}'

    async def test(lab: Lab) -> None:
        answer = await lab.start("POST", TEXT, chunks=[body]).whole()
        assert answer.status == 200
        assert answer.json()["usage"]["prompt_tokens"] == 2
        assert answer.json()["usage"]["completion_tokens"] <= 2

    run_lively(test)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_nesting_of_a_hundred_thousand_levels_costs_nothing(
    run_lively: RunLab, opening: bytes
) -> None:
    async def test(lab: Lab) -> None:
        tracemalloc.start()
        try:
            (await lab.start("POST", CHAT, chunks=[opening * 100_000]).whole()).check_refused()
            assert tracemalloc.get_traced_memory()[1] < 50 * MIB
        finally:
            tracemalloc.stop()

    run_lively(test)


def test_a_body_of_33_mib_is_not_read_to_its_end(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        piece = b"x" * MIB
        live = lab.start("POST", TEXT, chunks=[piece] * 33)
        answer = await live.whole()
        answer.check_refused(413)
        assert answer.headers["connection"] == "close"
        assert len(live._chunks) == 33 - (Limits().body_bytes // MIB + 1)

    run_lively(test)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type_is_400(run_lively: RunLab, kind: str) -> None:
    async def test(lab: Lab) -> None:
        headers = {"content-type": kind}
        (await lab.start("POST", CHAT, {"messages": MESSAGES}, headers).whole()).check_refused()

    run_lively(test)


@pytest.mark.parametrize("text", ["\0", "a\0b", "\ufffe\uffff", "\u202e", "\x1b[31m", "e\u0301"])
def test_strange_characters_are_encoded_or_refused(run_lively: RunLab, text: str) -> None:
    """The tokenizer of these tests has no token for some, which is no fault of the server."""

    async def test(lab: Lab) -> None:
        for answer in (await lab.chat(text, max_tokens=2), await lab.complete(text, max_tokens=2)):
            assert answer.status == 200 or answer.check_refused() is None

    run_lively(test)


def test_a_text_of_a_megabyte_is_refused_before_it_is_encoded(
    run_lively: RunLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(lab: Lab) -> None:
        asked: list[str] = []
        real = lab.llm.tokenizer.encode

        def encode(text: str, **options: Any) -> list[int]:
            asked.append(text)
            ids: list[int] = real(text, **options)
            return ids

        with monkeypatch.context() as patch:
            patch.setattr(lab.llm.tokenizer, "encode", encode)
            for answer in (await lab.chat("x" * MIB), await lab.complete("x" * MIB)):
                answer.check_refused()
                assert answer.error["code"] == "context_length_exceeded"
                assert "maximum context length is 64" in answer.error["message"]
        assert asked == []

    run_lively(test)


def test_a_million_token_ids_are_refused_with_both_numbers(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.complete([1] * 10**6)
        answer.check_refused()
        assert answer.error["code"] == "context_length_exceeded"
        assert "1000000" in answer.error["message"]
        assert "64" in answer.error["message"]

    run_lively(test, ServerConfig(limits=Limits(chars_per_token=10**6)))


@pytest.mark.parametrize(("length", "made"), [(62, 2), (63, 1), (64, None), (65, None)])
def test_a_prompt_at_the_edge_of_the_context(
    run_lively: RunLab, length: int, made: int | None
) -> None:
    async def test(lab: Lab) -> None:
        answers = [
            await lab.complete("x" * length, ignore_eos=True),
            await lab.chat("x" * length, ignore_eos=True),
            await lab.complete([1] * length, ignore_eos=True),
        ]
        for answer in answers:
            if made is None:
                answer.check_refused()
                assert answer.error["code"] == "context_length_exceeded"
            else:
                assert answer.json()["usage"]["completion_tokens"] == made
                assert answer.json()["choices"][0]["finish_reason"] == "length"

    run_lively(test)


NUMBERS = [-1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 1e308, 0.5, "1", True, None]
FIELDS = (
    *("max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "min_tokens", "top_logprobs", "logprobs"),
    *("max_completion_tokens", "stop_token_ids", "logit_bias", "stop"),
)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_number_in_every_field_is_served_or_refused_by_name(
    run_lively: RunLab, path: str
) -> None:
    async def test(lab: Lab) -> None:
        start = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
        for name in FIELDS:
            for value in NUMBERS:
                given = value
                if name == "stop_token_ids" and value is not None:
                    given = [value]
                elif name == "logit_bias" and value is not None:
                    given = {"1": value}
                body = {**start, "max_tokens": 1, name: given}
                answer = await lab.start("POST", path, chunks=[json.dumps(body).encode()]).whole()
                if answer.status != 200:
                    answer.check_refused()
                    assert answer.error["param"] == name, (value, answer.body)

    run_lively(test)


def test_a_billion_choices_are_refused_before_anything_is_allocated(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        tracemalloc.start()
        try:
            for fields in ({"n": 10**9}, {"n": 129}):
                (await lab.chat(**fields)).check_refused()
                (await lab.complete(**fields)).check_refused()
            (await lab.complete(["a"] * 1024, n=128)).check_refused()
            assert tracemalloc.get_traced_memory()[1] < 20 * MIB
        finally:
            tracemalloc.stop()

    run_lively(test)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []], {"a": 1}, 5, None])
def test_an_empty_prompt_is_refused(run_lively: RunLab, prompt: Any) -> None:
    async def test(lab: Lab) -> None:
        (await lab.complete(prompt)).check_refused()

    run_lively(test)


@pytest.mark.parametrize(
    "messages", [[], {}, "hi", [5], [{}], [{"role": "user"}], [{"role": 5, "content": "x"}], None]
)
def test_empty_messages_are_refused(run_lively: RunLab, messages: Any) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.post(CHAT, {"messages": messages})
        answer.check_refused()
        assert answer.error["param"] == "messages"

    run_lively(test)


@pytest.mark.parametrize("token", [-1, 84, 2**31, 2**63])
def test_tokens_that_the_model_does_not_have_are_refused(run_lively: RunLab, token: int) -> None:
    async def test(lab: Lab) -> None:
        for prompt in ([token], [[1, 2], [token]]):
            answer = await lab.complete(prompt)
            answer.check_refused()
            assert answer.error["param"] == "prompt"

    run_lively(test)
