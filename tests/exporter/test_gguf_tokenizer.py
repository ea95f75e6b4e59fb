"""The word rules that GGUF files name."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models

from trtllm_lite.exporter.gguf_tokenizer import RULES, apply_rule
from trtllm_lite.runtime.errors import UnsupportedError

# Byte-level text shows a blank as this letter.
BLANK = "\u0120"


def bare() -> Any:
    return Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))


def words(rule: str, text: str) -> list[str]:
    tokenizer = bare()
    apply_rule(tokenizer, "gpt2", rule)
    return [w.replace(BLANK, " ") for w, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("rule", RULES)
def test_words_lose_nothing(rule: str) -> None:
    text = "It's 12345 o'clock,  isn't it?\tyes 7"
    tokenizer = bare()
    apply_rule(tokenizer, "gpt2", rule)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert "".join(text[a:b] for a, b in spans) == text


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("gpt-2", ["x", " 12345"]),
        ("llama-bpe", ["x", " ", "123", "45"]),
        ("qwen2", ["x", " ", *"12345"]),
        ("smollm", ["x", " ", *"12345"]),
        ("starcoder", ["x", " ", *"12345"]),
    ],
)
def test_digits_are_what_rules_differ_in(rule: str, expected: list[str]) -> None:
    assert words(rule, "x 12345") == expected


def test_contractions_in_capitals() -> None:
    assert words("llama-bpe", "IT'S") == ["IT", "'S"]
    assert words("gpt-2", "IT'S") == ["IT", "'", "S"]


def test_whole_words_before_merges() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    apply_rule(tokenizer, "gpt2", "qwen2")
    assert tokenizer.encode("ab").tokens == ["a", "b"]
    apply_rule(tokenizer, "gpt2", "llama-bpe")
    assert tokenizer.encode("ab").tokens == ["ab"]


@pytest.mark.parametrize("name", [None, "default", "tekken"])
def test_an_unknown_rule_is_refused(name: str | None) -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre") as caught:
        apply_rule(bare(), "gpt2", name)
    assert "llama-bpe" in str(caught.value)


def test_other_vocabularies_are_left_alone() -> None:
    tokenizer = bare()
    apply_rule(tokenizer, "llama", None)
    assert tokenizer.pre_tokenizer is None
