"""The same weights in each peer's own starting format.

From one GGUF file come a float32 Hugging Face folder (for the exporters of onnxruntime-genai and
OpenVINO) and a float32 GGUF file (for llama.cpp's quantizer); from a random Hugging Face checkpoint
comes a GGUF file.
"""

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Files that transformers before 5 reads the rope base from.
_ROPE_KEYS = ("rope_theta", "rope_local_base_freq")

# Hugging Face's name of a Llama weight, and llama.cpp's.
_LLAMA_NAMES = (
    (r"model\.embed_tokens\.weight", "token_embd.weight"),
    (r"model\.norm\.weight", "output_norm.weight"),
    (r"lm_head\.weight", "output.weight"),
    (r"model\.layers\.(\d+)\.input_layernorm\.weight", r"blk.\1.attn_norm.weight"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.weight", r"blk.\1.ffn_norm.weight"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.weight", r"blk.\1.attn_\2.weight"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight", r"blk.\1.attn_output.weight"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight", r"blk.\1.ffn_\2.weight"),
)


def hugging_face_folder(source: Path, folder: Path) -> None:
    """A float32 safetensors checkpoint with tokenizer, dequantized from a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    plain = copy.deepcopy(loaded.config)
    del plain.quantization_config  # with it the model counts as quantized and is not saved
    model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(with_flat_rope(json.loads(config.read_text())), indent=1))


def with_flat_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the rope bases also where transformers before 5 looks for them."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    local = rope.get("sliding_attention", {})
    values = (full.get("rope_theta"), local.get("rope_theta"))
    flat = {k: v for k, v in zip(_ROPE_KEYS, values, strict=True) if v is not None}
    return {**config, **flat}


def float32_gguf(source: Path, target: Path) -> None:
    """A GGUF file with the same metadata and every tensor dequantized to float32."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    written = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in written:
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(tuple(reversed(tensor.shape.tolist()))))
    _close(writer)


def gguf_of_random_llama(folder: Path, target: Path) -> None:
    """A GGUF file of a `make_checkpoint` folder, in bfloat16, without a vocabulary."""
    from gguf import GGMLQuantizationType, GGUFWriter

    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(target, "llama")
    _add_llama_header(writer, config)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, bits in bfloat16_tensors(folder / "model.safetensors"):
        to = llama_cpp_name(name)
        if projection := re.search(r"self_attn\.([qk])_proj", name):
            bits = interleaved_rope(bits, heads[projection[1]])
        if bits.ndim == 1:
            writer.add_tensor(to, widened(bits))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(to, raw, raw_dtype=GGMLQuantizationType.BF16)
    _close(writer)


def _add_llama_header(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_name(name: str) -> str:
    """Raises ValueError for a weight that is not a Llama's."""
    for pattern, to in _LLAMA_NAMES:
        if match := re.fullmatch(pattern, name):
            return match.expand(to)
    raise ValueError(f"{name}: not the name of a Llama's weight")


def interleaved_rope(weight: Array, heads: int) -> Array:
    """Rows of a q or k projection from the half-split order of Hugging Face to the pairs of
    llama.cpp: [heads, 2, dim / 2] to [heads, dim / 2, 2]."""
    rows, width = weight.shape
    split = weight.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows, width)


def bfloat16_tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """Names and uint16 bit patterns of a safetensors file that holds only bfloat16."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + size]))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}; expected BF16")
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        yield name, data[start:stop].view(np.uint16).reshape(entry["shape"])


def widened(bits: Array) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    MAKERS = {
        "hf": hugging_face_folder,
        "gguf": float32_gguf,
        "random": gguf_of_random_llama,
    }
    MAKERS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
