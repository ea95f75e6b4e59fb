"""Bytes of tokens: joined, they are the text, whatever characters the tokens cut through."""

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from trtllm_lite.runtime.token_bytes import byte_level_bytes
from trtllm_lite.runtime.tokenizer import Tokenizer

CORPUS = ["the quick brown fox, naïve café", "你好 世界 🙂👍🏽 日本語", "x = {1: 'a'}\n\tpass\n"]
TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"], exclude_characters="▁"),
        st.sampled_from("ab é你世🙂🏽\u200d"),
    ),
    max_size=40,
)


def byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def byte_fallback() -> tokenizers.Tokenizer:
    """As SentencePiece's: words begin with a mark, what has no token is spelled in bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeé你", "▁a", "ab"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("▁", "a"), ("a", "b")]
    raw = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return raw


BYTE_LEVEL = Tokenizer(byte_level())
BYTE_FALLBACK = Tokenizer(byte_fallback())


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_bytes_of_a_byte_level_text_are_its_own(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_bytes_of_a_byte_fallback_text_are_its_own_after_the_first_space(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text)
    joined = b"".join(map(BYTE_FALLBACK.token_bytes, ids))
    assert joined == (b" " + text.encode() if text else b"")
    assert BYTE_FALLBACK.decode(ids) == text


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=12))
def test_any_tokens_decode_to_their_bytes(ids: list[int]) -> None:
    """A model may make any tokens, characters that never end among them."""
    joined = b"".join(map(BYTE_LEVEL.token_bytes, ids))
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == joined.decode(errors="replace")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_parts_of_a_character_are_its_bytes(make: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode("a🦉")
    parts = [tokenizer.token_bytes(i) for i in ids]
    first = next(n for n, part in enumerate(parts) if part[:1] == b"\xf0")
    assert b"".join(parts[first:]) == "🦉".encode()
    assert {tokenizer.token_text(i) for i in ids[first:]} == {"\ufffd"}
    assert len(parts[first:]) > 1


def test_special_tokens_and_ids_without_a_token() -> None:
    assert BYTE_LEVEL.token_bytes(0) == b"<s>"
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size) == b""


def test_every_byte_has_a_character_of_its_own() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level_bytes(c)[0] for c in alphabet) == list(range(256))
    assert byte_level_bytes("a b") == b"a b"
