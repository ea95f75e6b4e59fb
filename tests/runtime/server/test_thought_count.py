"""Tokens of reasoning are those up to its end."""

from typing import Any

import pytest

from trtllm_lite.runtime.server.thought_count import count_thought


class Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self._texts.index(text)] if text in self._texts else [0, 1]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self._texts[i] for i in ids)


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (("<think>", "a", "</think>", "b", "c"), 3),
        (("<think>", "a", "</", "think>", "b", "</", "think>"), 4),
        (("<think>", "a", "</thi", "nk>b"), 4),
        (("</think>",), 1),
        (("<think>", "a", "b"), 3),
    ],
)
def test_the_tag_may_be_one_token_or_several(texts: tuple[str, ...], count: int) -> None:
    tokenizer: Any = Pieces(*texts)
    made = count_thought(tokenizer, range(len(texts)), "".join(texts))
    assert made == count
