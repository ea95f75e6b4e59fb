"""A GGUF file gives the same bundle as the safetensors checkpoint that it was made from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, dequantize, quantize
from safetensors.numpy import load_file

from trtllm_lite.exporter import gguf as module
from trtllm_lite.exporter.checkpoint import open_checkpoint
from trtllm_lite.exporter.gguf import GgufSource, metadata_text
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.exporter.skeleton import build_skeleton
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import CheckpointError, UnsupportedError
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.runtime.tokenizer import Tokenizer

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Change = Callable[[GGUFWriter], None]


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def permuted(weight: Any, heads: int) -> Any:
    """Rows of Q and K as llama.cpp keeps them: pairs of a head next to each other."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def tensors(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's tensors as a GGUF file holds them."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    made = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        kind = next((k for k in heads if f".{k}_proj." in name), None)
        made[gguf_name(name)] = weight if kind is None else permuted(weight, heads[kind])
    return made


def add_facts(writer: GGUFWriter, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_license("mit")


def add_tokenizer(writer: GGUFWriter, checkpoint: Path) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    facts = json.loads((checkpoint / "tokenizer_config.json").read_text())
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t.startswith("<") and t.endswith(">") else 1 for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(facts["chat_template"])


def write(
    path: Path, checkpoint: Path, *, kind: Kind = Kind.F32, more: Change | None = None
) -> Path:
    """A GGUF file of the checkpoint, its matrices stored as `kind`."""
    writer = GGUFWriter(path, "llama")
    add_facts(writer, checkpoint)
    add_tokenizer(writer, checkpoint)
    for name, array in tensors(checkpoint).items():
        if array.ndim == 2:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    if more is not None:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf", tiny_checkpoint)


@pytest.fixture(scope="module")
def q8(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    return write(path, tiny_checkpoint, kind=Kind.Q8_0)


def source(path: Path) -> GgufSource:
    config = open_checkpoint(str(path), None, NoProgress()).config
    return GgufSource(path, build_skeleton(config, "eager").model)


def read(made: GgufSource, name: str) -> Any:
    return np.concatenate(list(made.pieces(name))).reshape(made.shape(name))


def read_all(made: GgufSource) -> dict[str, Any]:
    return {name: read(made, name) for name in sorted(made.names())}


def test_the_permutation_is_llama_cpp_s() -> None:
    """Row i of the first half of a head becomes its row 2 i."""
    rows = np.arange(16)[:, None]
    assert permuted(rows, 2)[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_metadata(plain: Path) -> None:
    assert metadata_text(plain, "general.license") == "mit"
    assert metadata_text(plain, "general.nothing") is None


def test_the_configuration_is_the_checkpoint_s(plain: Path, tiny_checkpoint: Path) -> None:
    made = open_checkpoint(str(plain), None, NoProgress())
    want = open_checkpoint(str(tiny_checkpoint), None, NoProgress()).config
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size",
                "max_position_embeddings", "tie_word_embeddings", "intermediate_size"):  # fmt: skip
        assert getattr(made.config, key) == getattr(want, key), key
    assert (made.source.id, made.source.format) == ("tiny.F32.gguf", "gguf")
    assert made.source.license == "mit"
    assert made.weight_bytes == plain.stat().st_size
    assert made.json("generation_config.json") is None


def test_tensors_are_the_checkpoint_s(plain: Path, tiny_checkpoint: Path) -> None:
    made, want = source(plain), load_file(tiny_checkpoint / "model.safetensors")
    assert made.names() == want.keys()
    for name, weight in want.items():
        assert made.shape(name) == weight.shape
        assert np.array_equal(read(made, name), weight), name


def test_quantized_tensors_are_dequantized(q8: Path, tiny_checkpoint: Path) -> None:
    made, want = source(q8), load_file(tiny_checkpoint / "model.safetensors")
    raw = tensors(tiny_checkpoint)
    for name, weight in want.items():
        got = read(made, name)
        if weight.ndim == 1:
            assert np.array_equal(got, weight)
            continue
        assert not np.array_equal(got, weight)
        # A block of 32 has steps of its largest value / 127.
        assert np.abs(got - weight).max() <= np.abs(weight).max() / 127 / 2 * 1.01
        if "q_proj" not in name and "k_proj" not in name:
            exact = dequantize(quantize(raw[gguf_name(name)], Kind.Q8_0), Kind.Q8_0)
            assert np.array_equal(got, exact)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q5_1, Kind.Q8_0])
def test_every_type_is_read_as_gguf_py_reads_it(
    tiny_checkpoint: Path, tmp_path: Path, kind: Kind
) -> None:
    made = source(write(tmp_path / "x.gguf", tiny_checkpoint, kind=kind))
    raw = tensors(tiny_checkpoint)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        want = dequantize(quantize(raw[gguf_name(name)], kind), kind)
        assert np.array_equal(read(made, name), want)


def test_a_file_that_shrinks_while_it_is_read(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny_checkpoint)
    made = source(path)
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"x\.gguf ends inside tensor"):
        read_all(made)


def test_the_bundle_is_that_of_the_checkpoint(
    plain: Path, tiny_checkpoint: Path, tiny_bundle: Path, tmp_path: Path, traced: None
) -> None:
    """Weights byte for byte, the tokenizer text for text, and the certificate passes."""
    options = ExportOptions(model=str(plain), output=tmp_path / "out", max_model_len=16)
    report = export(options, NoProgress())
    assert report.parity is not None
    assert report.parity["passed"] is True
    weights = (tmp_path / "out" / "weights.bin").read_bytes()
    assert weights == (tiny_bundle / "weights.bin").read_bytes()
    made, want = (Tokenizer.from_bundle(open_bundle(b)) for b in (tmp_path / "out", tiny_bundle))
    for text in ("the river ran slowly", "naïve 水 🙂", "<s> and </s>", "  two  blanks\n"):
        assert made.encode(text) == want.encode(text)
        assert made.decode(made.encode(text)) == want.decode(want.encode(text))
    messages = [{"role": "user", "content": "hi"}]
    assert made.apply_chat_template(messages) == want.apply_chat_template(messages)
    facts, other = report.manifest.model, open_bundle(tiny_bundle).manifest.model
    assert (facts.bos_token_id, facts.eos_token_ids) == (other.bos_token_id, other.eos_token_ids)


def test_a_quantized_file_is_exported(q8: Path, tmp_path: Path, traced: None) -> None:
    """The reference is the same file, so that the certificate is about the conversion alone."""
    options = ExportOptions(model=str(q8), output=tmp_path / "out", max_model_len=16)
    report = export(options, NoProgress())
    assert report.parity is not None
    assert report.parity["passed"] is True


# Refusals


def test_an_unknown_tensor(tiny_checkpoint: Path, tmp_path: Path, traced: None) -> None:
    extra = np.ones(32, np.float32)
    path = write(
        tmp_path / "x.gguf", tiny_checkpoint, more=lambda w: w.add_tensor("blk.0.odd.weight", extra)
    )
    with pytest.raises(CheckpointError, match=r"no place for the checkpoint's blk\.0\.odd\.weight"):
        export(ExportOptions(model=str(path), output=tmp_path / "out"), NoProgress())
    assert not (tmp_path / "out").exists()


def test_rope_factors_are_not_dropped(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Llama 3.1's rope scaling is a tensor in GGUF, which transformers does not read."""
    factors = np.ones(8, np.float32)
    path = write(
        tmp_path / "x.gguf",
        tiny_checkpoint,
        more=lambda w: w.add_tensor("rope_freqs.weight", factors),
    )
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight") as caught:
        open_checkpoint(str(path), None, NoProgress())
    assert "export from the safetensors checkpoint" in str(caught.value)


def test_a_type_that_cannot_be_dequantized(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_data: Any, kind: Any) -> Any:
        raise NotImplementedError(f"Dequantization for {kind} is not implemented")

    monkeypatch.setattr(module, "dequantize", refuse)
    with pytest.raises(UnsupportedError, match=r"GGUF tensors of type F32 \(output_norm\.weight\)"):
        list(source(plain).pieces("model.norm.weight"))


def test_a_tensor_for_several_parameters(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = source(plain)
    processed = type("Processed", (), {"name": None, "weights": None})
    monkeypatch.setattr(made._processor, "process", lambda **_kwargs: processed)
    with pytest.raises(UnsupportedError, match="maps to several parameters"):
        list(made.pieces("model.norm.weight"))
