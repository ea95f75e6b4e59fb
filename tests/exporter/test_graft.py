"""What the probe finds out about a model's attention, and what it refuses."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    sliding_window_overlay,
)

from trtllm_lite.exporter import graft
from trtllm_lite.exporter.families import BASE, PROVED, tiny_config
from trtllm_lite.exporter.graft import PROBE, TRACE, AttentionFacts, probe
from trtllm_lite.exporter.skeleton import Skeleton, build_skeleton
from trtllm_lite.exporter.trace import quiet
from trtllm_lite.runtime.errors import UnsupportedError

Mask = Callable[..., Any]


def skeleton(config: Any) -> Skeleton:
    with quiet():
        return build_skeleton(config, PROBE)


def facts_of(name: str) -> list[AttentionFacts]:
    made = skeleton(tiny_config(next(f for f in PROVED if f.name == name)))
    with quiet():
        return probe(made)


# Facts


def test_llama() -> None:
    facts = facts_of("SmolLM2")
    assert facts == [AttentionFacts(4, 2, 16, 16**-0.5)] * 2


def test_gemma2() -> None:
    """Softcap, a scale of its own, every other layer sliding."""
    sliding = AttentionFacts(4, 2, 32, 24**-0.5, sliding_window=8, softcap=5.0)
    full = AttentionFacts(4, 2, 32, 24**-0.5, sliding_window=None, softcap=5.0)
    assert facts_of("Gemma 2") == [sliding, full]


def test_gemma3() -> None:
    windows = [fact.sliding_window for fact in facts_of("Gemma 3")]
    assert windows == [8, 8, 8, 8, 8, None]


@pytest.mark.parametrize(("name", "windows"), [("Mistral", [None]), ("Mistral 7B v0.1", [8])])
def test_mistral(name: str, windows: list[int | None]) -> None:
    assert [fact.sliding_window for fact in facts_of(name)] == windows * 2


def test_granite_scale() -> None:
    assert {fact.scale for fact in facts_of("Granite 3")} == {0.2}


def test_probing_leaves_the_model_ready_to_trace() -> None:
    made = skeleton(AutoConfig.for_model("llama", **BASE))
    with quiet():
        probe(made)
    assert made.model.config._attn_implementation == TRACE


# Masks


def sliding(size: int) -> Mask:
    made: Mask = and_masks(sliding_window_overlay(size), causal_mask_function)
    return made


def chunked(size: int) -> Mask:
    overlay = chunked_overlay(size, torch.zeros(1, dtype=torch.int64))
    made: Mask = and_masks(overlay, causal_mask_function)
    return made


def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key < 2


def strided(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key) % 2 == 0


SIZES = [1, 2, 3, 4, 7, 8, 31, 64]


@pytest.mark.parametrize("size", [None, *SIZES])
def test_a_causal_mask(size: int | None) -> None:
    assert graft._classify(causal_mask_function, size) is None


@pytest.mark.parametrize("size", SIZES)
def test_a_sliding_mask(size: int) -> None:
    assert graft._classify(sliding(size), size) == size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("other", [-1, 1])
def test_a_window_that_is_not_the_declared_one(size: int, other: int) -> None:
    if size + other > 0:
        with pytest.raises(UnsupportedError, match="neither causal nor"):
            graft._classify(sliding(size + other), size)


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_chunked_mask_is_refused(size: int) -> None:
    with pytest.raises(UnsupportedError, match="neither causal nor a causal sliding window"):
        graft._classify(chunked(size), size)


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize(
    "mask",
    [
        bidirectional_mask_function,
        or_masks(causal_mask_function, prefix),
        and_masks(causal_mask_function, strided),
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: k < 0,
    ],
    ids=["bidirectional", "prefix", "strided", "without itself", "nothing"],
)
def test_other_masks_are_refused(mask: Mask, size: int | None) -> None:
    with pytest.raises(UnsupportedError, match="neither causal nor a causal sliding window"):
        graft._classify(mask, size)


def test_a_sliding_mask_that_hides_its_size_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="neither causal nor"):
        graft._classify(sliding(8), None)


# Attention calls

CAUSAL = torch.empty(0).as_subclass(graft.MaskShape)


def call(mask: Any = CAUSAL, module: Any = None, keys: int = 3, v_dim: int = 8, **kw: Any) -> Any:
    q, k, v = torch.empty(1, 4, 3, 8), torch.empty(1, 2, keys, 8), torch.empty(1, 2, keys, v_dim)
    return graft._facts(module or SimpleNamespace(), q, k, v, mask, None, kw)


def windowed(size: int) -> Any:
    mask = torch.empty(0).as_subclass(graft.MaskShape)
    mask.sliding_window = size
    return mask


def test_the_arguments_of_a_call() -> None:
    assert call() == AttentionFacts(4, 2, 8, 8**-0.5)
    made = call(windowed(5), sliding_window=5, softcap=2, s_aux=torch.zeros(4), dropout=0.1)
    assert made == AttentionFacts(4, 2, 8, 8**-0.5, sliding_window=5, softcap=2.0, sinks=True)


def test_the_mask_has_the_last_word_on_the_window() -> None:
    """transformers' eager attention does not look at the argument."""
    assert call(sliding_window=5).sliding_window is None
    assert call(windowed(5)).sliding_window == 5
    with pytest.raises(UnsupportedError, match="a window of 6 under a mask of 5"):
        call(windowed(5), sliding_window=6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"alibi_slopes": torch.ones(4)}, "attention with alibi_slopes"),
        ({"position_bias": 1, "indexer": 2}, "attention with position_bias, indexer"),
        ({"module": SimpleNamespace(is_cross_attention=True)}, "cross-attention"),
        ({"v_dim": 4}, "unequal K and V head sizes"),
        ({"keys": 5}, "more keys than queries"),
        ({"mask": None}, "made outside transformers' mask interface"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "made outside transformers' mask interface"),
    ],
)
def test_calls_that_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        call(**arguments)


def test_an_unknown_argument_that_is_none_says_nothing() -> None:
    assert call(alibi_slopes=None) == call()


def test_a_model_that_ignores_the_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def own(module: Any, hidden_states: Any, **_kwargs: Any) -> tuple[Any, None]:
        return hidden_states, None

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", own)
    made = skeleton(AutoConfig.for_model("llama", **BASE))
    with quiet(), pytest.raises(UnsupportedError, match="its own attention code"):
        probe(made)
