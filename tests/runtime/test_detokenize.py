"""Text that grows token by token, against decoding all tokens at once."""

from random import Random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from trtllm_lite.runtime.detokenize import Detokenizer, LateDetokenizer
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer

SPECIAL = ["<|start|>", "<|end|>"]
CORPUS = ["Hello world, naïve café 你好世界 🙂👍🏽 e\u0301", "def f(x):\n    return x", "ab ab abc"]


def byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def pieces_vocab() -> dict[str, int]:
    """A SentencePiece-like vocabulary: bytes, spaced and unspaced pieces."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁▁", "▁a", "a", "b", "▁ab", "é", "你", "\ufffd", "▁你好", "🙂"]
    return {name: i for i, name in enumerate(names)}


def byte_fallback() -> tokenizers.Tokenizer:
    vocab = pieces_vocab()
    raw = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    raw.add_special_tokens(SPECIAL)
    return raw


def metaspace() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE(pieces_vocab(), [], unk_token="<unk>"))
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens(SPECIAL)
    return raw


def word_suffix() -> tokenizers.Tokenizer:
    names = ["a</w>", "b</w>", "c", "d", "é</w>"]
    raw = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    raw.decoder = decoders.BPEDecoder(suffix="</w>")
    raw.add_special_tokens(SPECIAL)
    return raw


def words() -> tokenizers.Tokenizer:
    names = ["<unk>", "hello", "world", "你好", "é", "\ufffd"]
    vocab = {name: i for i, name in enumerate(names)}
    raw = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.add_special_tokens(SPECIAL)
    return raw


TOKENIZERS = {
    make.__name__: Tokenizer(make())
    for make in (byte_level, byte_fallback, metaspace, word_suffix, words)
}
BYTES = TOKENIZERS["byte_level"]
EACH = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def ids_of(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    """Any ids, with some that only a padded model vocabulary has; often bytes or special ones."""
    size = tokenizer.vocab_size
    some = st.one_of(st.integers(0, size + 2), st.integers(max(0, size - 15), size - 1))
    return data.draw(st.lists(some, max_size=60))


def bytes_of(text: str) -> list[int]:
    vocab = pieces_vocab()
    return [vocab[f"<0x{byte:02X}>"] for byte in text.encode()]


@EACH
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=80, deadline=None)
def test_pieces_and_flush_are_the_decoded_text(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = ids_of(tokenizer, data)
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    pieces = [detokenizer.append(i) for i in ids]
    assert "".join(pieces) == detokenizer.text
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)
    for piece in pieces:
        piece.encode("utf-8")


@EACH
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=40, deadline=None)
def test_text_that_waits_for_the_end_is_the_same(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids, params = ids_of(tokenizer, data), SamplingParams(skip_special_tokens=skip)
    late, soon = LateDetokenizer(tokenizer, params), Detokenizer(tokenizer, params)
    for token_id in ids:
        soon.append(token_id)
        assert late.append(token_id) == late.text == ""
    soon.flush()
    assert late.flush() == late.text == soon.text
    assert late.flush() == ""
    assert late.text == soon.text


@EACH
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_only_what_may_still_change_is_held_back(tokenizer: Tokenizer, data: st.DataObject) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False))
    ids: list[int] = []
    for token_id in ids_of(tokenizer, data):
        detokenizer.append(token_id)
        ids.append(token_id)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if not tokenizer.is_byte(next((i for i in ids[::-1] if i < tokenizer.vocab_size), 0)):
            assert detokenizer.text == text.removesuffix("\ufffd")


@given(st.randoms(use_true_random=False), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_long_runs_of_broken_bytes(random: Random, rarely: int) -> None:
    broken = [i for i in range(BYTES.vocab_size) if "\ufffd" in BYTES.token_text(i)]
    detokenizer = Detokenizer(BYTES, SamplingParams())
    ids = [
        random.choice(broken) if random.randrange(rarely) else random.randrange(BYTES.vocab_size)
        for _ in range(300)
    ]
    for i, token_id in enumerate(ids):
        detokenizer.append(token_id)
        if i % 50 == 0:
            assert detokenizer.text == BYTES.decode(ids[: i + 1]).removesuffix("\ufffd")
    detokenizer.flush()
    assert detokenizer.text == BYTES.decode(ids)


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_in_whole_characters(text: str) -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams())
    pieces = [detokenizer.append(i) for i in BYTES.encode(text)] + [detokenizer.flush()]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_of_one_character_come_as_one_piece() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    letter = tokenizer.encode("b")
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    pieces = [detokenizer.append(i) for i in [*bytes_of("🙂"), *letter]]
    assert pieces == ["", "", "", "", "🙂b"]
    broken = Detokenizer(tokenizer, SamplingParams())
    assert [broken.append(i) for i in bytes_of("🙂")[:3]] == ["", "", ""]
    assert broken.flush() == "\ufffd" * 3


def test_the_space_before_the_first_word_is_dropped_once() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    word = pieces_vocab()["▁a"]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    pieces = [detokenizer.append(word) for _ in range(40)]
    assert pieces == ["a", *[" a"] * 39]


STOPS = st.lists(st.text("ab🙂é\ufffd", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, stops: list[str], after: int, include: bool) -> tuple[str, str | None]:
    """The slow reference: the text up to the stop that completes first beyond `after`."""
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    ids=st.one_of(
        st.text("ab🙂é", max_size=20).map(BYTES.encode),
        st.lists(st.integers(0, BYTES.vocab_size), max_size=20),
    ),
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
@settings(max_examples=400, deadline=None)
def test_stops_equal_a_search_of_the_final_text(
    ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    plain = Detokenizer(BYTES, SamplingParams())
    lengths = [0]
    for token_id in ids:
        plain.append(token_id)
        lengths.append(len(plain.text))
    early = lengths[min(max(min_tokens - 1, 0), len(ids))]
    if len(ids) < min_tokens:
        early = len(BYTES.decode(ids))
    expected = cut(BYTES.decode(ids), stops, early, include)

    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    detokenizer, pieces = Detokenizer(BYTES, params), list[str]()
    for token_id in ids:
        pieces.append(detokenizer.append(token_id))
        if detokenizer.stop_reason is not None:
            break
    pieces.append(detokenizer.flush())
    assert ("".join(pieces), detokenizer.stop_reason) == expected
    assert detokenizer.text == expected[0]
    if detokenizer.stop_reason is not None:
        assert detokenizer.append(BYTES.encode("a")[0]) == detokenizer.flush() == ""
        assert detokenizer.text == expected[0]


def pieces_until_stop(text: str, stop: str | list[str], *, include: bool = False) -> list[str]:
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    detokenizer = Detokenizer(BYTES, params)
    letters = [i for char in text for i in BYTES.encode(char)]
    return [detokenizer.append(i) for i in letters] + [detokenizer.flush()]


def test_a_stop_is_held_back_while_it_may_come_true() -> None:
    assert pieces_until_stop("xaab", "aac") == ["x", "", "", "aab", ""]
    assert pieces_until_stop("xaaac", "aac") == ["x", "", "", "a", "", ""]
    assert pieces_until_stop("xaaac", "aac", include=True) == ["x", "", "", "a", "aac", ""]
    assert pieces_until_stop("xaa", "aac") == ["x", "", "", "aa"]


def test_the_stop_that_completes_first_wins() -> None:
    assert "".join(pieces_until_stop("xabcd", ["abcd", "bc"])) == "xa"
    assert "".join(pieces_until_stop("xabcd", ["c", "abc"])) == "x"
