"""GGUF files: configuration, tokenizer and tensors, through transformers' own GGUF tables.

transformers' loader dequantizes a whole file at once; here its name map and its per-architecture
processors are applied to one tensor at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from trtllm_lite.runtime.errors import UnsupportedError

Array = npt.NDArray[Any]


def architecture(path: Path) -> str:
    """The file's `general.architecture`."""
    field = GGUFReader(str(path)).fields["general.architecture"]
    return str(bytes(field.parts[field.data[0]]), "utf-8")


def metadata_text(path: Path, key: str) -> str | None:
    """A string field of the file, None when it is not there."""
    field = GGUFReader(str(path)).fields.get(key)
    return None if field is None else str(bytes(field.parts[field.data[0]]), "utf-8")


class GgufSource:
    """Tensors of a GGUF file under transformers' parameter names, dequantized to float32."""

    def __init__(self, path: Path, model: Any) -> None:
        config = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
        processor_class = TENSOR_PROCESSORS.get(architecture(path), TensorProcessor)
        self._processor = processor_class(config=config)
        self._tensors = {t.name: t for t in GGUFReader(str(path)).tensors}
        mapping = get_gguf_hf_weights_map(model, self._processor)
        self._keys = {hf: name for name, hf in mapping.items() if name in self._tensors}
        self._unknown = frozenset(self._tensors) - frozenset(mapping)

    def names(self) -> frozenset[str]:
        """Mapped names, and the raw names of tensors that nothing maps."""
        return frozenset(self._keys) | self._unknown

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[self._keys[name]]
        return tuple(int(d) for d in reversed(tensor.shape))

    def pieces(self, name: str) -> Iterator[Array]:
        key = self._keys[name]
        tensor = self._tensors[key]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UnsupportedError(
                f"GGUF tensors of type {kind} ({key})",
                "the types that gguf-py dequantizes",
                "use another quantization of the file",
            ) from error
        result = self._processor.process(weights=values, name=key)
        if result.name != key:
            raise UnsupportedError(
                f"a GGUF tensor that maps to several parameters ({key})",
                "one tensor per parameter",
                "export from the safetensors checkpoint",
            )
        yield np.ascontiguousarray(result.weights, dtype=np.float32).reshape(-1)
