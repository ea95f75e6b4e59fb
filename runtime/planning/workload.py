"""What a model asks of a machine: bytes to hold, bytes to read, multiplications to do."""

from collections.abc import Iterable
from dataclasses import dataclass

from trtllm_lite.runtime.manifest import DTYPE_BYTES, KVLayer


@dataclass(frozen=True)
class Workload:
    """One model in one set of weight formats.

    weight_bytes: of one copy of all weights. step_bytes: of the weights that a decode step reads.
    body_products, head_products: pairs of a multiplication and an addition for one token, in the
    layers and for its logits. attention_width: query heads times head size, summed over layers:
    pairs for one token's scores against one earlier token; its values take as many again.
    """

    weight_bytes: int
    step_bytes: int
    body_products: int
    head_products: int
    vocab_size: int
    layers: tuple[KVLayer, ...]
    kv_dtype: str
    attention_width: int

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token, over all layers."""
        return sum(map(self._layer_bytes, self.layers))

    def kv_read_bytes(self, context: int) -> int:
        """What one token reads of the cache with `context` tokens before it."""
        return sum(self._layer_bytes(layer) * _seen(layer, context) for layer in self.layers)

    @property
    def token_flops(self) -> float:
        """Of one token and its logits, without attention."""
        return 2.0 * (self.body_products + self.head_products)

    def attention_flops(self, context: int) -> float:
        """Of one token's attention to `context` tokens."""
        return self._attention(_seen(layer, context) for layer in self.layers)

    def prompt_flops(self, tokens: int) -> float:
        """Of a whole prompt and the logits of its last token, without attention."""
        return 2.0 * (self.body_products * tokens + self.head_products)

    def prompt_attention_flops(self, tokens: int) -> float:
        """Of a whole prompt's attention to itself, each token to those up to it."""
        return self._attention(_seen_by_all(layer, tokens) for layer in self.layers)

    def _layer_bytes(self, layer: KVLayer) -> int:
        return 2 * layer.num_kv_heads * layer.head_dim * DTYPE_BYTES[self.kv_dtype]

    def _attention(self, pairs: Iterable[int]) -> float:
        return 4.0 * self.attention_width / max(1, len(self.layers)) * sum(pairs)


def _seen(layer: KVLayer, context: int) -> int:
    return context if layer.sliding_window is None else min(context, layer.sliding_window)


def _seen_by_all(layer: KVLayer, tokens: int) -> int:
    window = _seen(layer, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window
