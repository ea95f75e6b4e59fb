"""Which long prompts a certificate is made with."""

from types import SimpleNamespace

import pytest

from trtllm_lite.exporter import verify
from trtllm_lite.runtime.manifest import KVLayer, KVSpec


def kv(*windows: int | None, recompute_at: int | None = None) -> KVSpec:
    return KVSpec("float32", tuple(KVLayer(1, 8, w) for w in windows), recompute_at=recompute_at)


def config(**rope: object) -> SimpleNamespace:
    return SimpleNamespace(num_attention_heads=4, rope_parameters=rope)


def test_past_every_window() -> None:
    assert verify._boundaries(kv(None, 8, 8, 32), config(), 1000) == [13, 37]


def test_past_the_original_context() -> None:
    scaled = config(rope_type="yarn", original_max_position_embeddings=64)
    assert verify._boundaries(kv(None), scaled, 1000) == [69]
    nested = config(full_attention={"original_max_position_embeddings": 16}, sliding_attention={})
    assert verify._boundaries(kv(None), nested, 1000) == [21]


def test_both_sides_of_a_switch() -> None:
    scaled = config(rope_type="longrope", original_max_position_embeddings=64)
    assert verify._boundaries(kv(None, recompute_at=64), scaled, 1000) == [61, 69]


def test_never_over_the_limit() -> None:
    assert verify._boundaries(kv(8, 512), config(), 100) == [13]


def test_long_prompts_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four heads of 100 x 100 scores and weights are 320,000 bytes."""
    monkeypatch.setattr(verify, "_free_bytes", lambda: 640_000)
    assert verify._reference_holds(config(), 100)
    assert not verify._reference_holds(config(), 101)
