"""Text, token ids and messages to requests: what is taken and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.request_maker import ChatOptions, RequestMaker, Source
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=20, max_num_batched_tokens=8, max_kv_tokens=40)
DEFAULTS = SamplingParams(temperature=0.3, max_tokens=12)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
    "{% if tools %} tool{% endif %}{% if add_generation_prompt %} assistant{% endif %}"
    "{% if extra is defined %} {{ extra }}{% endif %}"
)
WORDS = ["<bos>", "user", "assistant", "hi", "there", "tool", "more"]


def make_tokenizer() -> Tokenizer:
    """One token a word; `encode` puts <bos> in front unless told otherwise."""
    raw = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "hi"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    raw.add_special_tokens(["<bos>"])
    return Tokenizer(raw, bos_token_id=0, chat_template=TEMPLATE)


MAKER = RequestMaker(make_tokenizer(), DEFAULTS, CONFIG)
BARE = RequestMaker(None, DEFAULTS, CONFIG)
HELLO = [{"role": "user", "content": "hi there"}]


def words(ids: tuple[int, ...]) -> list[str]:
    return [WORDS[i] for i in ids]


def test_text_is_encoded_with_its_special_tokens() -> None:
    job = MAKER.make(Source(prompt="hi there"), None, ChatOptions(), "my-id")
    assert words(job.request.prompt_token_ids) == ["<bos>", "hi", "there"]
    assert (job.prompt, job.request.id, job.request.params) == ("hi there", "my-id", DEFAULTS)
    assert job.request.arrival_time > 0


def test_messages_become_the_templates_text_with_no_second_bos() -> None:
    job = MAKER.make(Source(messages=HELLO), None, ChatOptions())
    assert words(job.request.prompt_token_ids) == ["<bos>", "user", "hi", "there", "assistant"]
    assert job.prompt == "<bos> user hi there assistant"
    assert job.request.params == replace(DEFAULTS, max_tokens=None)


def test_chat_options_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    options = ChatOptions([tool], add_generation_prompt=False, template={"extra": "more"})
    job = MAKER.from_messages(HELLO, None, options)
    assert words(job.request.prompt_token_ids)[-2:] == ["tool", "more"]


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), [np.int64(1), np.int32(2)]])
def test_token_ids_may_be_any_integers(ids: Any) -> None:
    job = BARE.make(Source(prompt_token_ids=ids), None, ChatOptions())
    assert job.request.prompt_token_ids == (1, 2)
    assert {type(i) for i in job.request.prompt_token_ids} == {int}
    assert job.prompt is None


@pytest.mark.parametrize("ids", [["1"], [1.0], [True, 2], 7, [[1]], "12"])
def test_what_is_no_token_id_is_refused(ids: Any) -> None:
    with pytest.raises(RequestError, match="prompt_token_ids"):
        MAKER.from_token_ids(ids, None)


def test_default_max_tokens_give_way_to_the_context() -> None:
    assert MAKER.from_token_ids([1] * 8, None).request.params.max_tokens == 12
    assert MAKER.from_token_ids([1] * 9, None).request.params.max_tokens is None
    asked = SamplingParams(max_tokens=12)
    assert MAKER.from_token_ids([1] * 9, asked).request.params.max_tokens == 12


def test_ids_are_made_up_and_differ() -> None:
    ids = {MAKER.from_token_ids([1], None).request.id for _ in range(5)}
    assert len(ids) == 5


@pytest.mark.parametrize(
    "source",
    [
        Source(),
        Source(prompt="hi", prompt_token_ids=[1]),
        Source(prompt="hi", messages=HELLO),
        Source(messages=HELLO, prompt_token_ids=[1]),
        Source("hi", HELLO, [1]),
    ],
)
def test_exactly_one_source_is_allowed(source: Source) -> None:
    with pytest.raises(RequestError, match="one of"):
        MAKER.make(source, None, ChatOptions())


@pytest.mark.parametrize("source", [Source(prompt="hi"), Source(prompt_token_ids=[1])])
def test_chat_options_without_messages_are_refused(source: Source) -> None:
    with pytest.raises(RequestError, match="messages"):
        MAKER.make(source, None, ChatOptions(template={"extra": "more"}))


def test_what_is_neither_text_nor_parameters_is_refused() -> None:
    wrong: Any = 0
    with pytest.raises(RequestError, match="prompt"):
        MAKER.from_text(wrong, None)
    with pytest.raises(RequestError, match="params"):
        MAKER.from_text("hi", wrong)


def test_without_a_tokenizer_text_and_stop_strings_are_refused() -> None:
    for source in (Source(prompt="hi"), Source(messages=HELLO)):
        with pytest.raises(RequestError, match="prompt_token_ids"):
            BARE.make(source, None, ChatOptions())
    with pytest.raises(RequestError, match="stop_token_ids"):
        BARE.from_token_ids([1], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="no tokenizer"):
        _ = BARE.tokenizer
