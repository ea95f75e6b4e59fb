"""How large K and V get on a text, channel by channel: the steps of an int8 cache.

Keys are kept rotated, and a channel's size depends on the angle: windows of the text are read at
places spread over the whole context. What is larger later on is cut off at 127 steps.
"""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from trtllm_lite.exporter.native.cache import CacheScales
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import KVLayer
from trtllm_lite.runtime.progress import Progress

Array = npt.NDArray[Any]
LEVELS = 127
# Largest values are soon seen: more windows change little.
WINDOWS = 16
# Room above the largest value of the text.
MARGIN = 1.1
# Of a layer's largest channel: what a channel that the text left empty has room for.
SMALLEST = 1e-3
TINY = 1e-30


def cache_scales(
    model: Any, layers: Sequence[KVLayer], windows: Array, longest: int, progress: Progress
) -> CacheScales:
    """Read the first windows [count, length] of token ids. longest: tokens of the whole context.

    Raises UnsupportedError for a model whose own cache is not one of these layers.
    """
    moved = "position_ids" in _arguments(model)
    read = windows[:WINDOWS]
    starts = np.linspace(0, max(0, longest - windows.shape[1]), len(read)).astype(int)
    largest: list[Array] = []
    for index, (window, start) in enumerate(zip(read, starts, strict=True)):
        seen = _largest(model, window, int(start) if moved else 0)
        largest = list(map(np.maximum, largest or seen, seen))
        progress.advance(index + 1, len(read), "windows of text")
    if [x.shape for x in largest] != [(2, x.num_kv_heads * x.head_dim) for x in layers]:
        raise UnsupportedError(
            "an int8 cache of a model that keeps keys and values in a form of its own",
            "keys and values of every attention layer",
            "export with --kv-dtype float16",
        )
    return CacheScales(
        tuple(_steps(keys) for keys, _ in largest), tuple(_steps(values) for _, values in largest)
    )


def _largest(model: Any, window: Array, start: int) -> list[Array]:
    """Magnitudes of K and V on one window whose first token is at `start`, for each layer
    [2, kv_heads * head_dim]."""
    ids = torch.from_numpy(np.asarray(window, np.int64)[None])
    places = {"position_ids": torch.arange(start, start + len(window))[None]} if start else {}
    cache = DynamicCache()
    # transformers before 5.24 has the older name.
    given = {"cache" if "cache" in _arguments(model) else "past_key_values": cache}
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **given, **places)
    return [np.stack([_channels(x.keys), _channels(x.values)]) for x in cache.layers]


def _arguments(model: Any) -> Collection[str]:
    return inspect.signature(model.forward).parameters.keys()


def _channels(cached: torch.Tensor) -> Array:
    """[1, kv_heads, tokens, head_dim] -> the largest magnitude of each channel."""
    made: Array = cached[0].float().abs().amax(1).flatten().numpy()
    return made


def _steps(largest: Array) -> Array:
    floor = max(float(largest.max()) * SMALLEST, TINY)
    made: Array = (np.maximum(largest, floor) * (MARGIN / LEVELS)).astype(np.float32)
    return made
