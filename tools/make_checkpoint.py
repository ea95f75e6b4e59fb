"""Make a random Llama-shaped checkpoint, to measure an export of a given size.

    python -m trtllm_lite.tools.make_checkpoint FOLDER --shape 1b
    python -m trtllm_lite.tools.make_checkpoint FOLDER --shape 8b --sparse

Weights are bfloat16 noise, written tensor by tensor, so that making the file needs no memory
either. --sparse leaves a hole of the right size instead of data, enough for a dry run.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

PIECE = 8 * 2**20
STD = 0.02


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool

    def config(self) -> dict[str, object]:
        """The checkpoint's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in file order."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            base = f"model.layers.{i}."
            for name, rows in (("q", self.hidden), ("k", kv), ("v", kv), ("o", self.hidden)):
                yield f"{base}self_attn.{name}_proj.weight", (rows, self.hidden)
            for name in ("gate", "up"):
                yield f"{base}mlp.{name}_proj.weight", (self.intermediate, self.hidden)
            yield f"{base}mlp.down_proj.weight", (self.hidden, self.intermediate)
            for name in ("input", "post_attention"):
                yield f"{base}{name}_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 96, 160, True),
    "135m": Shape(576, 30, 9, 3, 1536, 49152, True),
    "1b": Shape(2048, 16, 32, 8, 8192, 128256, True),
    "8b": Shape(4096, 32, 32, 8, 14336, 128256, False),
}


def make_checkpoint(
    folder: Path, shape: Shape, *, sparse: bool, seed: int, std: float = STD
) -> int:
    """Write config.json and model.safetensors; returns the bytes of the weights. `std`: their
    standard deviation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    header, total = _header(shape)
    rng = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as handle:
        handle.write(struct.pack("<Q", len(header)) + header)
        if sparse:
            handle.truncate(handle.tell() + total)
            return total
        for _, dims in shape.tensors():
            for piece in _noise(rng, int(np.prod(dims)), std, norm=len(dims) == 1):
                handle.write(piece)
    return total


def _header(shape: Shape) -> tuple[bytes, int]:
    """The safetensors header, padded to 8 bytes as the format asks."""
    entries, end = {}, 0
    for name, dims in shape.tensors():
        start, end = end, end + 2 * int(np.prod(dims))
        entries[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8), end


def _noise(rng: np.random.Generator, count: int, std: float, *, norm: bool) -> Iterator[bytes]:
    """Normal noise (ones for norms) as bfloat16, which is the upper half of a float32."""
    while count:
        size = min(count, PIECE)
        values = np.ones(size, np.float32) if norm else rng.standard_normal(size, np.float32) * std
        yield (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        count -= size


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="1b", show_default=True)
@click.option("--sparse", is_flag=True, help="Leave a hole instead of data.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(folder: Path, shape: str, sparse: bool, seed: int) -> None:
    """Make a random Llama-shaped checkpoint in FOLDER."""
    total = make_checkpoint(folder, SHAPES[shape], sparse=sparse, seed=seed)
    click.echo(f"{folder}: {total / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
