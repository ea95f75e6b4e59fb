"""Puts back what TensorRT's ONNX parser drops of an attention: how many keys of each row are valid.

The parser takes `nonpad_kv_seqlen` of ONNX's Attention and forgets it, and it aligns a causal mask
with the first key where ONNX, given those lengths, aligns it with the last valid one. The network
would build and compute something else. So both are said again on the parsed network, layer by
layer, and what was set is read back. Where an attention takes no lengths, a mask says the same.
Sources: ONNX, operator Attention-24; NVIDIA TensorRT, IAttention and CausalMaskKind.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trtllm_lite.runtime.engines.attention_mask import RowMasks
from trtllm_lite.runtime.engines.onnx_edit import AttentionNode
from trtllm_lite.runtime.engines.trt_api import Attention, Network, Tensor
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.errors import TrtllmLiteError

AttentionForm = Literal["lengths", "mask"]
"""How a plan says which keys are valid: as a number for each row, or as a mask."""


class BuildError(TrtllmLiteError):
    """TensorRT cannot build a graph, or would build something else than the graph says."""


@dataclass(frozen=True)
class Patched:
    """Attention layers of a network; those that were told the valid keys of each row; those of them
    aligned with the last valid key."""

    layers: int
    lengths_set: int
    lower_right: int


class AttentionPatch:
    """Makes every attention of a parsed network what its ONNX node says. Has to live until the
    network is built.

    decomposable: let TensorRT compute an attention for which it has no kernel in several steps.
    capacity: tokens of a slot.
    """

    def __init__(
        self,
        trt: TensorRT,
        network: Network,
        capacity: int,
        form: AttentionForm,
        *,
        decomposable: bool,
    ) -> None:
        self._trt = trt
        self._network = network
        self._capacity = capacity
        self._form = form
        self._decomposable = decomposable
        self._named = {tensor.name: tensor for tensor in _tensors(network)}
        self._masks: RowMasks | None = None
        self._casts: dict[str, Tensor] = {}

    def apply(self, nodes: tuple[AttentionNode, ...]) -> Patched:
        """Raises BuildError when a node has no layer, a layer no node, a layer was parsed in an
        unknown way, or does not keep what was set."""
        layers = {a.get_output(0).name: a for a in _attentions(self._trt, self._network)}
        if layers.keys() != {node.output for node in nodes}:
            text = f"the graph has {len(nodes)} attentions, the parsed network {len(layers)} others"
            raise BuildError(f"{text}; this TensorRT reads it in another way than is known here")
        for node in nodes:
            layer = layers[node.output]
            layer.decomposable = self._decomposable
            self._check_parsed(layer, node)
            if node.lengths is not None:
                self._set_valid(layer, node, node.lengths)
        limited = [node for node in nodes if node.lengths is not None]
        return Patched(len(layers), len(limited), sum(node.is_causal for node in limited))

    def _check_parsed(self, layer: Attention, node: AttentionNode) -> None:
        """What is changed has to be what is known."""
        if layer.causal != node.is_causal:
            raise BuildError(f"{node.output!r} was parsed with causal {layer.causal}")
        if self._trt.has_row_lengths:
            kinds = self._trt.module.CausalMaskKind
            known = kinds.UPPER_LEFT if node.is_causal else kinds.NONE
            if layer.causal_kind != known:
                raise BuildError(f"{node.output!r} was parsed as {layer.causal_kind}, not {known}")

    def _set_valid(self, layer: Attention, node: AttentionNode, name: str) -> None:
        if name not in self._named:
            raise BuildError(f"the parsed network lacks {name!r}, the lengths of an attention")
        if self._form == "lengths":
            self._set_lengths(layer, node, name)
        else:
            self._set_mask(layer, node, name)

    def _set_lengths(self, layer: Attention, node: AttentionNode, name: str) -> None:
        """INT32 [batch], as IAttention wants them."""
        kinds = self._trt.module.CausalMaskKind
        wanted = kinds.LOWER_RIGHT if node.is_causal else kinds.NONE
        if name not in self._casts:
            cast = self._network.add_cast(self._named[name], self._trt.module.DataType.INT32)
            self._casts[name] = cast.get_output(0)
        layer.causal_kind = wanted
        layer.key_value_lengths = self._casts[name]
        kept = layer.key_value_lengths
        if layer.causal_kind != wanted or kept is None or kept.name != self._casts[name].name:
            raise BuildError(f"{node.output!r} does not keep the lengths that were set")

    def _set_mask(self, layer: Attention, node: AttentionNode, name: str) -> None:
        if layer.mask is not None:
            raise BuildError(f"{node.output!r} has a mask already, and lengths of rows")
        if self._masks is None:
            self._masks = RowMasks(self._trt.module, self._network, self._capacity)
        query = layer.get_input(0)
        mask = self._masks.mask(self._named[name], query, causal=node.is_causal)
        layer.causal = False
        layer.mask = mask
        if layer.causal or layer.mask is None or layer.mask.name != mask.name:
            raise BuildError(f"{node.output!r} does not keep the mask that was set")


def _attentions(trt: TensorRT, network: Network) -> Iterator[Attention]:
    for i in range(network.num_layers):
        attention = trt.attention_of(network.get_layer(i))
        if attention is not None:
            yield attention


def _tensors(network: Network) -> Iterator[Tensor]:
    """Inputs, and what layers give."""
    yield from (network.get_input(i) for i in range(network.num_inputs))
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        yield from (layer.get_output(j) for j in range(layer.num_outputs))
