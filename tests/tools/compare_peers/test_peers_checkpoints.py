"""Conversions keep the weights, their names and what the rope does."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

from trtllm_lite.tools.compare_peers.checkpoints import (
    bfloat16_tensors,
    float32_gguf,
    gguf_of_random_llama,
    interleaved_rope,
    llama_cpp_name,
    widened,
    with_flat_rope,
)
from trtllm_lite.tools.make_checkpoint import SHAPES, make_checkpoint

HEADS, DIM = 2, 8


def rotated_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Hugging Face: component i turns with component i + dim / 2."""
    a, b = x[:, : DIM // 2], x[:, DIM // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def rotated_pairs(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """llama.cpp: component 2i turns with component 2i + 1."""
    a, b = x[:, ::2], x[:, 1::2]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=2).reshape(x.shape)


def test_scores_are_the_same_in_either_rope() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, HEADS * DIM, 5))
    x, angles = rng.normal(size=5), rng.normal(size=(2, DIM // 2))

    def dots(rotated: object, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        assert callable(rotated)
        heads = [rotated((w @ x).reshape(HEADS, DIM), a) for w, a in zip((q, k), angles)]  # noqa: B905
        return np.asarray((heads[0] * heads[1]).sum(axis=1))

    expected = dots(rotated_halves, q, k)
    found = dots(rotated_pairs, interleaved_rope(q, HEADS), interleaved_rope(k, HEADS))
    assert found == pytest.approx(expected)


def test_a_random_llama_becomes_gguf(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", SHAPES["tiny"], sparse=False, seed=0)
    gguf_of_random_llama(tmp_path / "hf", tmp_path / "x.gguf")
    reader = GGUFReader(tmp_path / "x.gguf")
    tensors = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
    weights = dict(bfloat16_tensors(tmp_path / "hf" / "model.safetensors"))
    assert len(tensors) == len(weights) == 2 + 2 * 9
    for name, bits in weights.items():
        expected = widened(bits)
        if "q_proj" in name:
            expected = interleaved_rope(expected, SHAPES["tiny"].heads)
        if "k_proj" in name:
            expected = interleaved_rope(expected, SHAPES["tiny"].kv_heads)
        np.testing.assert_array_equal(tensors[llama_cpp_name(name)], expected)
    assert reader.fields["llama.attention.head_count_kv"].contents() == SHAPES["tiny"].kv_heads


def test_an_unknown_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        llama_cpp_name("model.layers.0.self_attn.q_proj.bias")


def test_a_float32_gguf_holds_the_dequantized_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(4, 64)).astype(np.float32)
    packed = quantize(matrix, GGMLQuantizationType.Q4_1)
    writer = GGUFWriter(tmp_path / "in.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("w", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    float32_gguf(tmp_path / "in.gguf", tmp_path / "out.gguf")
    reader = GGUFReader(tmp_path / "out.gguf")
    (tensor,) = reader.tensors
    assert tensor.tensor_type == GGMLQuantizationType.F32
    expected = dequantize(packed, GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(tensor.data, expected)
    assert np.abs(expected - matrix).max() > 0
    assert reader.fields["llama.block_count"].contents() == 3
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]


def test_rope_bases_are_also_where_they_used_to_be() -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert with_flat_rope(plain) == {**plain, "rope_theta": 5.0}
    layers = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0}}
    nested = {"rope_parameters": layers}
    assert with_flat_rope(nested) == {**nested, "rope_theta": 7.0, "rope_local_base_freq": 3.0}
    assert with_flat_rope({"n": 1}) == {"n": 1}
