"""A few layers stand for all: the same bytes as a trace of the whole model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.exporter.families import PROVED, tiny_config
from trtllm_lite.exporter.graft import AttentionFacts
from trtllm_lite.exporter.graphs import grafted
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.outline import outline
from trtllm_lite.exporter.outline_layers import Layers, find_layers, is_like, sample
from trtllm_lite.exporter.skeleton import Skeleton
from trtllm_lite.runtime.progress import NoProgress

LENGTH = 128


def config_of(key: str, layers: int, **more: Any) -> Any:
    family = next(family for family in PROVED if family.key == key)
    number = {"num_hidden_layers": layers}
    return tiny_config(replace(family, tiny={**family.tiny, **number, **more}))


def looked_at(config: Any) -> tuple[Skeleton, list[AttentionFacts], Layers]:
    skeleton, facts, _ = grafted(config, LENGTH)
    found = find_layers(config, skeleton, facts)
    assert found is not None
    return skeleton, facts, found


def test_layers_of_a_kind_are_counted() -> None:
    config = config_of("gemma_3", 12)
    _, facts, layers = looked_at(config)
    assert [fact.sliding_window for fact in facts[4:7]] == [8, None, 8]
    assert layers.prefix == "model.layers"
    made = sample(config, layers)
    assert made is not None
    # The first and the last stand for themselves; between them are nine sliding layers and a full.
    assert (made.picks, made.counts) == ((0, 1, 5, 11), (1, 9, 1, 1))
    assert made.config.num_hidden_layers == 4
    assert made.config.layer_types == [config.layer_types[i] for i in made.picks]
    assert config.num_hidden_layers == 12
    assert made.times("model.layers.1.mlp.gate_proj.weight+model.layers.1.mlp.up.dq8") == 9
    assert made.times("model.layers.2.self_attn.o_proj.weight") == 1
    assert made.times("model.layers.11x.weight") == made.times("lm_head.weight") == 1
    skeleton, facts, _ = grafted(made.config, LENGTH)
    assert is_like(find_layers(made.config, skeleton, facts), layers, made.picks)
    assert not is_like(find_layers(made.config, skeleton, facts), layers, (0, 5, 1, 11))


def test_what_a_configuration_says_by_layer_makes_kinds() -> None:
    config = config_of("smollm3", 8)
    _, _, layers = looked_at(config)
    assert layers.kinds[3] == layers.kinds[7] != layers.kinds[0] == layers.kinds[1]
    made = sample(config, layers)
    assert made is not None
    assert (made.picks, made.counts) == ((0, 1, 3, 7), (1, 5, 1, 1))
    assert made.config.no_rope_layers == [config.no_rope_layers[i] for i in made.picks]


def test_few_layers_are_all_traced() -> None:
    for number in (1, 2, 3):
        config = config_of("smollm2", number)
        assert sample(config, looked_at(config)[2]) is None


def test_layers_that_share_weights_or_attentions_are_no_layers() -> None:
    config = config_of("smollm2", 6)
    skeleton, facts, _ = looked_at(config)
    assert find_layers(config, skeleton, facts[:-1]) is None
    name = "model.layers.1.mlp.up_proj.weight"
    tied = replace(skeleton, aliases={**skeleton.aliases, name: name.replace("1", "0")})
    assert find_layers(config, tied, facts) is None


Outlines = Callable[[Any, ExportOptions], tuple[Any, Any]]


@pytest.fixture
def outlines(monkeypatch: pytest.MonkeyPatch) -> Outlines:
    """The outlines of a configuration: by a sample of its layers, and by all of them."""

    def made(config: Any, options: ExportOptions) -> tuple[Any, Any]:
        module = "trtllm_lite.exporter.outline"
        monkeypatch.setattr(f"{module}.open_config", lambda *_args: config)
        some = outline(options, NoProgress())
        monkeypatch.setattr(f"{module}.sample", lambda *_args: None)
        return some, outline(options, NoProgress())

    return made


@pytest.mark.parametrize(
    ("key", "layers", "target", "quantize"),
    [("gemma_3", 7, "cpu", "int4"), ("opt", 4, "tensorrt", "int8")],
)
def test_some_layers_outline_what_all_do(
    outlines: Outlines, key: str, layers: int, target: str, quantize: str
) -> None:
    options = ExportOptions(
        model="unused", output=Path("unused"), target=target, quantize=quantize, dry_run=True
    )
    some, whole = outlines(config_of(key, layers), options)
    assert some == whole
    assert len(some.workload.layers) == layers
    assert (some.native is None) is (target != "cpu")


def test_a_sample_that_is_not_like_the_whole_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, traced = config_of("smollm2", 4), list[int]()
    module = "trtllm_lite.exporter.outline"

    def strange(given: Any, layers: Layers) -> Any:
        made = sample(given, layers)
        assert made is not None
        made.config.intermediate_size += 32
        return made

    class StopError(Exception):
        pass

    def count(given: Any, *_args: Any) -> Any:
        traced.append(given.num_hidden_layers)
        if len(traced) == 2:
            raise StopError
        skeleton, facts, _ = grafted(given, LENGTH)
        return SimpleNamespace(skeleton=skeleton, facts=facts)

    monkeypatch.setattr(f"{module}.open_config", lambda *_args: config)
    monkeypatch.setattr(f"{module}.sample", strange)
    monkeypatch.setattr(f"{module}.build_graphs", count)
    with pytest.raises(StopError):
        outline(ExportOptions(model="unused", output=Path("unused"), dry_run=True), NoProgress())
    assert traced == [3, 4]
