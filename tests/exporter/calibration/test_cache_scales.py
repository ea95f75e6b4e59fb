"""The steps of an int8 cache, against the largest keys and values of a slow look."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trtllm_lite.exporter.calibration.cache_scales import LEVELS, MARGIN, SMALLEST, cache_scales
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import KVLayer
from trtllm_lite.runtime.progress import NoProgress

Array = npt.NDArray[Any]
LONGEST = 128


def layers_of(model: Any) -> list[KVLayer]:
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    return [KVLayer(config.num_key_value_heads, dim)] * config.num_hidden_layers


def keys_and_values(model: Any, window: Array, start: int) -> list[tuple[Array, Array]]:
    """Of each layer, [kv_heads, tokens, dim], by the model's own rotation of what its projections
    give. Layers see what the model's layers see."""
    seen: list[tuple[Array, Array]] = []

    def look(module: Any, _args: Any, given: Any) -> None:
        x, (cos, sin) = given["hidden_states"], given["position_embeddings"]
        dim = module.head_dim
        made = (project(x)[0] for project in (module.k_proj, module.v_proj))
        k, v = (rows.unflatten(-1, (-1, dim)).transpose(0, 1) for rows in made)
        half = dim // 2
        turned = torch.cat([-k[..., half:], k[..., :half]], -1)
        seen.append(((k * cos + turned * sin).numpy(), v.numpy()))

    handles = [
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
        for layer in model.model.layers
    ]
    ids = torch.from_numpy(window[None])
    places = torch.arange(start, start + len(window))[None]
    with torch.no_grad():
        model(input_ids=ids, position_ids=places, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def test_steps_hold_what_the_text_has_at_places_over_the_whole_context(
    tiny_model: Any, windows: Any
) -> None:
    made = cache_scales(tiny_model, layers_of(tiny_model), windows, LONGEST, NoProgress())
    starts = np.linspace(0, LONGEST - windows.shape[1], len(windows)).astype(int)
    assert len(set(starts)) > 1
    found = [keys_and_values(tiny_model, w, int(s)) for w, s in zip(windows, starts, strict=True)]
    for layer in range(len(made.keys)):
        for part, steps in enumerate((made.keys[layer], made.values[layer])):
            largest = np.max([np.abs(f[layer][part]).max(1) for f in found], 0).ravel()
            assert largest.min() > SMALLEST * largest.max()
            np.testing.assert_allclose(steps, largest * MARGIN / LEVELS, rtol=1e-4)
            assert steps.dtype == np.float32


def test_channels_that_the_text_leaves_empty_have_some_room(tiny_model: Any, windows: Any) -> None:
    weight = tiny_model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        kept = weight[3].clone()
        weight[3] = 0
        made = cache_scales(tiny_model, layers_of(tiny_model), windows, LONGEST, NoProgress())
        weight[3] = kept
    steps = made.values[0]
    assert steps[3] == pytest.approx(steps.max() * SMALLEST, rel=1e-5)


def test_other_forms_of_keys_and_values_are_refused(tiny_model: Any, windows: Any) -> None:
    with pytest.raises(UnsupportedError, match="a form of its own"):
        cache_scales(tiny_model, [KVLayer(1, 8)], windows, LONGEST, NoProgress())
