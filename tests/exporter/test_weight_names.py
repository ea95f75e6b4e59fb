"""Which stored tensor becomes which parameter; nothing is missed or dropped in silence."""

from typing import Any

import pytest
from transformers import AutoConfig

from trtllm_lite.exporter.families import BASE, PROVED, tiny_config
from trtllm_lite.exporter.skeleton import Skeleton, build_skeleton
from trtllm_lite.exporter.weight_names import (
    check_shapes,
    match_names,
    refuse_unused,
    renamed,
)
from trtllm_lite.runtime.errors import CheckpointError


def skeleton(model_type: str, **values: Any) -> Skeleton:
    return build_skeleton(AutoConfig.for_model(model_type, **{**BASE, **values}), "eager")


@pytest.fixture(scope="module")
def untied() -> Skeleton:
    return skeleton("llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied() -> Skeleton:
    return skeleton("llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def neox() -> Skeleton:
    return build_skeleton(
        tiny_config(next(f for f in PROVED if f.model_type == "gpt_neox")), "eager"
    )


def matched(made: Skeleton, stored: set[str]) -> dict[str, str]:
    names = renamed(made.model, frozenset(stored))
    wanted = dict.fromkeys(made.aliases.values())
    keys = match_names(made.model, made.aliases, wanted, frozenset(names))
    refuse_unused(made.model, made.aliases, keys, frozenset(names))
    return {name: names[key] for name, key in keys.items()}


def test_own_names(untied: Skeleton) -> None:
    stored = set(untied.aliases)
    assert matched(untied, stored) == {name: name for name in stored}


def test_names_without_the_base_prefix(untied: Skeleton) -> None:
    stored = {name.removeprefix("model.") for name in untied.aliases}
    found = matched(untied, stored)
    assert found["model.norm.weight"] == "norm.weight"
    assert found["lm_head.weight"] == "lm_head.weight"


def test_names_with_one_prefix_more(untied: Skeleton) -> None:
    stored = {f"model.{name}" for name in untied.aliases}
    assert matched(untied, stored)["model.norm.weight"] == "model.model.norm.weight"


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_tensor_stands_under_either_name(tied: Skeleton, kept: str) -> None:
    both = {"model.embed_tokens.weight", "lm_head.weight"}
    assert len({tied.aliases[name] for name in both}) == 1
    found = matched(tied, (set(tied.aliases) - both) | {kept})
    assert found[tied.aliases[kept]] == kept


def test_a_tied_tensor_may_stand_there_twice(tied: Skeleton) -> None:
    found = matched(tied, set(tied.aliases))
    assert len(found) == len(tied.aliases) - 1


def test_untied_embeddings_are_two(untied: Skeleton) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor for lm_head\.weight$"):
        matched(untied, set(untied.aliases) - {"lm_head.weight"})


def test_missing_tensors_are_named(untied: Skeleton) -> None:
    with pytest.raises(CheckpointError) as caught:
        matched(untied, {n for n in untied.aliases if ".layers." not in n})
    names = [n for n in untied.aliases if ".layers." in n]
    assert sum(name in str(caught.value) for name in names) == 4
    assert str(caught.value).endswith(f"and {len(names) - 4} more")


@pytest.mark.parametrize(
    "extra", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "x"]
)
def test_unused_tensors_are_refused(untied: Skeleton, extra: str) -> None:
    with pytest.raises(CheckpointError, match=f"no place for the checkpoint's {extra}$"):
        matched(untied, {*untied.aliases, extra})


def test_recomputed_buffers_are_ignored(untied: Skeleton) -> None:
    for extra in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        assert extra not in matched(untied, {*untied.aliases, extra}).values()


def test_old_buffers_of_gpt_neox_are_ignored(neox: Skeleton) -> None:
    old = {"gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"}
    assert not old & set(matched(neox, set(neox.aliases) | old).values())


def test_an_attention_bias_that_is_a_weight_is_not_ignored(neox: Skeleton) -> None:
    """`attention.dense.bias` is a parameter, `attention.bias` an old mask."""
    dense = "gpt_neox.layers.0.attention.dense.bias"
    with pytest.raises(CheckpointError, match="no tensor for"):
        matched(neox, set(neox.aliases) - {dense})


def test_gpt_neox_under_its_older_name(neox: Skeleton) -> None:
    """transformers renamed the output layer; checkpoints on the hub have the older name."""
    stored = {name.replace("lm_head", "embed_out") for name in neox.aliases}
    assert "embed_out.weight" in stored
    found = matched(neox, stored)
    assert found.keys() == set(neox.aliases)
    assert found["lm_head.weight"] == "embed_out.weight"


def test_shapes() -> None:
    check_shapes({"a": (2, 3)}, {"a": (2, 3)})
    with pytest.raises(CheckpointError, match=r"a: the checkpoint's shape is \[3, 2\]"):
        check_shapes({"a": (2, 3)}, {"a": (3, 2)})
    with pytest.raises(CheckpointError, match=r"the model's \[6\]"):
        check_shapes({"a": (6,)}, {"a": (2, 3)})
