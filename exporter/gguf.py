"""GGUF files: configuration, tokenizer and tensors, through transformers' own GGUF tables.

transformers' loader dequantizes a whole file at once; here its name map and its per-architecture
processors are applied to one tensor at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quant_shape_to_byte_shape
from transformers import modeling_gguf_pytorch_utils
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from trtllm_lite.exporter.gguf_guard import GGUFEntry, check_gguf
from trtllm_lite.runtime.errors import CheckpointError, UnsupportedError

Array = npt.NDArray[Any]


def metadata_text(path: Path, key: str) -> str | None:
    """A string field of the file, None when it is not there."""
    value = check_gguf(path).metadata.get(key)
    return value if isinstance(value, str) else None


@contextmanager
def silent_loading() -> Iterator[None]:
    """transformers shows a bar of its own for GGUF tensors, which no setting turns off."""
    original = modeling_gguf_pytorch_utils.tqdm
    modeling_gguf_pytorch_utils.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = original


class _Flat:
    """A model seen as one module. The name map's maker builds its table anew for every submodule,
    whose names the model's own already cover."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


class GgufSource:
    """Tensors of a GGUF file under transformers' parameter names, dequantized to float32.

    Raises UnsupportedError for a tensor type that gguf-py cannot dequantize, and for a tensor that
    does not hold exactly one parameter.
    """

    def __init__(self, path: Path, model: Any) -> None:
        header = check_gguf(path)
        self._path = path
        self._data_start = header.data_start
        self._tensors = {entry.name: entry for entry in header.tensors}
        architecture = str(header.metadata.get("general.architecture"))
        processor_class = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor = processor_class(config=model.config.to_dict())
        self._mapping = get_gguf_hf_weights_map(_Flat(model), self._processor)
        self._keys = {hf: name for name, hf in self._mapping.items() if name in self._tensors}
        self._unknown = frozenset(self._tensors) - frozenset(self._mapping)

    def names(self) -> frozenset[str]:
        """Mapped names, and the raw names of tensors that nothing maps."""
        return frozenset(self._keys) | self._unknown

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._tensors[self._keys[name]].shape))

    def pieces(self, name: str) -> Iterator[Array]:
        key = self._keys[name]
        values = self._dequantized(self._tensors[key])
        box: dict[str, dict[str, Any]] = {"tensors": {}}
        result = self._processor.process(
            weights=values, name=key, tensor_key_mapping=self._mapping, parsed_parameters=box
        )
        made = list(box["tensors"].values())
        if result.name != key and len(made) != 1:
            raise UnsupportedError(
                f"a GGUF tensor that maps to several parameters ({key})",
                "one tensor per parameter",
                "export from the safetensors checkpoint",
            )
        weights = result.weights if result.name == key else made[0]
        yield np.ascontiguousarray(weights, dtype=np.float32).reshape(-1)

    def _dequantized(self, entry: GGUFEntry) -> Array:
        kind = GGMLQuantizationType(entry.type)
        shape = tuple(reversed(entry.shape))
        raw = self._bytes(entry)
        if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            raw = raw.reshape(quant_shape_to_byte_shape(shape, kind))
        try:
            values: Array = dequantize(raw, kind).reshape(shape)
        except NotImplementedError as error:
            # What gguf-py raises for a type that it has a name for, but no decoder in Python.
            raise UnsupportedError(
                f"GGUF tensors of type {kind.name} ({entry.name})",
                "the types that gguf-py dequantizes",
                "use another quantization of the file",
            ) from error
        return values

    def _bytes(self, entry: GGUFEntry) -> Array:
        raw = np.empty(entry.stop - entry.start, np.uint8)
        with self._path.open("rb", buffering=0) as handle:
            handle.seek(self._data_start + entry.start)
            if handle.readinto(raw.data) != raw.nbytes:
                raise CheckpointError(f"{self._path.name} ends inside tensor {entry.name}")
        return raw
