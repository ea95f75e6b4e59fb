"""The bundle's tokenizer: loading, encoding, decoding, and its chat template."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import BundleError, RequestError
from trtllm_lite.runtime.manifest import (
    FileEntry,
    KVSpec,
    Limits,
    Manifest,
    ModelFacts,
    Quantization,
    Source,
)
from trtllm_lite.runtime.tokenizer import Tokenizer

CORPUS = ["Hello world, naïve café 你好 🙂", "the quick brown fox"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "Hello"}]


def byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<pad>"],
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return raw


def sentencepiece() -> tokenizers.Tokenizer:
    names = ["<unk>", "<0xC3>", "<0xA9>", "▁", "▁Paris", "Pa", "▁a"]
    vocab = {name: i for i, name in enumerate(names)}
    raw = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return raw


RAW = byte_level()
TOKENIZER = Tokenizer(byte_level(), bos_token_id=0, eos_token_ids=(1, 2), chat_template=TEMPLATE)


def bundle(folder: Path, *, vocab_size: int = 300, **files: str | bytes) -> Bundle:
    """A bundle that holds `tokenizer` and `chat_template`, as given, and nothing else."""
    names = {"tokenizer": "tokenizer.json", "chat_template": "chat_template.jinja"}
    entries = []
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / names[name]).write_bytes(data)
        entries.append(FileEntry(names[name], len(data), ""))
    facts = ModelFacts("test", "Test", 0, 1, 8, vocab_size, bos_token_id=0, eos_token_ids=(1,))
    manifest = Manifest(
        model=facts,
        source=Source("test", "safetensors"),
        target="cpu",
        dtype="float32",
        quantization=Quantization(),
        limits=Limits(1, 16),
        kv=KVSpec("float32", ()),
        graphs=(),
        weights="weights.bin",
        files=tuple(entries),
        tokenizer=names["tokenizer"] if "tokenizer" in files else None,
        chat_template=names["chat_template"] if "chat_template" in files else None,
    )
    return Bundle(folder, manifest)


def test_from_bundle(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_bundle(
        bundle(tmp_path, tokenizer=RAW.to_str(), chat_template=TEMPLATE)
    )
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.vocab_size == RAW.get_vocab_size()
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(HI) == "<s>[user]Hello"


def test_a_model_may_have_more_ids_but_not_fewer(tmp_path: Path) -> None:
    size = RAW.get_vocab_size()
    exact = bundle(tmp_path, vocab_size=size, tokenizer=RAW.to_str())
    assert Tokenizer.from_bundle(exact).vocab_size == size
    small = replace(exact.manifest, model=replace(exact.manifest.model, vocab_size=size - 1))
    with pytest.raises(BundleError, match=f"^tokenizer: .* up to {size - 1}, .* is {size - 1}$"):
        Tokenizer.from_bundle(Bundle(tmp_path, small))


def test_the_largest_id_counts_where_ids_have_gaps(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "a": 999}
    raw = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    assert Tokenizer(raw).vocab_size == 1000
    with pytest.raises(BundleError, match="up to 999"):
        Tokenizer.from_bundle(bundle(tmp_path, vocab_size=999, tokenizer=raw.to_str()))


@pytest.mark.parametrize(
    "garbage",
    ["", "{", "[]", '{"version": "1.0"}', "version https://git-lfs", b"\xff\xfe", '{"model": 1}'],
)
def test_garbage_is_a_bundle_error(tmp_path: Path, garbage: str | bytes) -> None:
    with pytest.raises(BundleError, match=r"^tokenizer: tokenizer.json is not a tokenizer") as got:
        Tokenizer.from_bundle(bundle(tmp_path, tokenizer=garbage))
    assert "\n" not in str(got.value)


@pytest.mark.parametrize(
    ("garbage", "message"),
    [("{% if %}", "cannot be compiled"), (b"\xff", "utf-8"), ("x" * (2**20 + 1), "over 1048576")],
)
def test_a_bad_template_is_a_bundle_error(
    tmp_path: Path, garbage: str | bytes, message: str
) -> None:
    with pytest.raises(BundleError, match=f"^chat_template: .*{message}"):
        Tokenizer.from_bundle(bundle(tmp_path, tokenizer=RAW.to_str(), chat_template=garbage))


def test_without_a_tokenizer_or_a_template(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"^tokenizer: the bundle has none; give prompt_token_id"):
        Tokenizer.from_bundle(bundle(tmp_path))
    tokenizer = Tokenizer.from_bundle(bundle(tmp_path, tokenizer=RAW.to_str()))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template; use generate with a prompt$"):
        tokenizer.apply_chat_template(HI)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(max_length=3)
    raw.enable_padding(length=50, pad_id=2, pad_token="<pad>")
    assert json.loads(raw.to_str())["truncation"]["max_length"] == 3
    tokenizer = Tokenizer.from_bundle(bundle(tmp_path, tokenizer=raw.to_str()))
    assert tokenizer.encode("Hello world") == RAW.encode("Hello world").ids
    assert 3 < len(tokenizer.encode("Hello world")) < 50


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == text.replace(
        "<s>", ""
    )


def test_special_tokens_are_added_and_skipped_on_request() -> None:
    with_bos = TOKENIZER.encode("Hello")
    assert with_bos == [0, *TOKENIZER.encode("Hello", add_special_tokens=False)]
    assert TOKENIZER.decode(with_bos) == "Hello"
    assert TOKENIZER.decode(with_bos, skip_special_tokens=False) == "<s>Hello"


def test_special_tokens_in_text_are_special_tokens() -> None:
    ids = TOKENIZER.encode("a</s>b", add_special_tokens=False)
    assert 1 in ids
    assert TOKENIZER.decode(ids) == "ab"
    message = [{"role": "user", "content": "a</s>b"}]
    prompt = TOKENIZER.apply_chat_template(message)
    assert TOKENIZER.encode(prompt, add_special_tokens=False).count(1) == 1


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^prompt: a lone surrogate at character 2"):
        TOKENIZER.encode("ab\ud83d")
    with pytest.raises(RequestError, match=r"^prompt: got int; allowed: a string"):
        TOKENIZER.encode(5)  # type: ignore[arg-type]  # the point: a caller without types


def test_text_without_tokens_is_refused() -> None:
    raw = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    tokenizer = Tokenizer(raw)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match=r"^prompt: the tokenizer cannot encode it"):
        tokenizer.encode("b")


def test_ids_without_a_token_decode_to_nothing() -> None:
    size = TOKENIZER.vocab_size
    hello = TOKENIZER.encode("Hello")
    assert TOKENIZER.decode([*hello, size, size + 5, -1]) == "Hello"
    assert TOKENIZER.token_text(size) == ""
    assert not TOKENIZER.has_text(size, skip_special_tokens=False)
    assert not TOKENIZER.has_text(-1, skip_special_tokens=False)


def test_has_text_follows_the_special_tokens() -> None:
    assert not TOKENIZER.has_text(1, skip_special_tokens=True)
    assert TOKENIZER.has_text(1, skip_special_tokens=False)
    assert TOKENIZER.has_text(TOKENIZER.encode("H")[-1], skip_special_tokens=True)


def test_token_text_is_the_tokens_own() -> None:
    ids = TOKENIZER.encode(" world é", add_special_tokens=False)
    texts = [TOKENIZER.token_text(i) for i in ids]
    assert "".join(texts) == " world é"
    assert TOKENIZER.token_text(1) == "</s>"
    half = RAW.token_to_id("Ã")
    assert half is not None
    assert TOKENIZER.token_text(half) == "\ufffd"


def test_token_text_keeps_the_space_that_a_text_would_begin_without() -> None:
    raw = sentencepiece()
    tokenizer = Tokenizer(raw)
    paris, byte = raw.token_to_id("▁Paris"), raw.token_to_id("<0xC3>")
    assert paris is not None
    assert byte is not None
    assert tokenizer.token_text(paris) == " Paris"
    assert tokenizer.decode([paris]) == "Paris"
    assert tokenizer.token_text(byte) == "\ufffd"
    assert tokenizer.is_byte(byte)
    assert not tokenizer.is_byte(paris)


def test_eos_token_is_the_first_of_several() -> None:
    assert TOKENIZER.eos_token == "</s>"
    assert Tokenizer(byte_level()).eos_token is None
    assert Tokenizer(byte_level()).bos_token is None
    shown = Tokenizer(byte_level(), eos_token_ids=(2, 1), chat_template="{{ eos_token }}")
    assert shown.apply_chat_template(HI) == "<pad>"


def test_template_arguments_arrive() -> None:
    source = "{{ tools|tojson }}{{ add_generation_prompt }}{{ mood }}"
    tokenizer = Tokenizer(byte_level(), chat_template=source)
    shown = tokenizer.apply_chat_template(
        HI, tools=[{"a": 1}], add_generation_prompt=False, mood="x"
    )
    assert shown == '[{"a": 1}]Falsex'
