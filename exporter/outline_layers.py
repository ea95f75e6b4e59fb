"""Which layers of a model a trace has to see, so that the bytes of all of them are known.

Layers of one kind have weights of the same shapes and attentions of the same facts, so that the
first layer, one in the middle of each kind and the last one stand for the others. Where that cannot
be made sure, all layers are traced.
"""

import copy
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trtllm_lite.exporter.graft import AttentionFacts
from trtllm_lite.exporter.skeleton import Skeleton


@dataclass(frozen=True)
class Layers:
    """Where the layers of a model are, and what each of them is like. prefix: of the names of their
    parameters, before the number. kinds: equal for layers that are alike."""

    prefix: str
    kinds: tuple[Hashable, ...]


@dataclass(frozen=True)
class Sample:
    """A model with some layers of another. config: its configuration. picks: the numbers that its
    layers have in the whole model. counts: how many layers each stands for, itself included."""

    config: Any
    prefix: str
    picks: tuple[int, ...]
    counts: tuple[int, ...]

    def times(self, name: str) -> int:
        """How many weights of the whole model one stands for that has this name in the sample. A
        packed weight's name begins with that of its first part."""
        found = re.match(rf"{re.escape(self.prefix)}\.(\d+)\.", name)
        return 1 if found is None else self.counts[int(found[1])]


def find_layers(config: Any, skeleton: Skeleton, facts: Sequence[AttentionFacts]) -> Layers | None:
    """The layers of a model that was probed; None where they are not one list with an attention in
    each and weights of its own."""
    number = getattr(config, "num_hidden_layers", None)
    if number is None:
        return None
    lists = [
        name
        for name, module in skeleton.model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == number
    ]
    if len(lists) != 1 or len(facts) != number:
        return None
    shapes: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(number)]
    for name, shape in skeleton.shapes.items():
        found = re.match(rf"{re.escape(lists[0])}\.(\d+)\.(.*)", name)
        if found is not None:
            if skeleton.aliases[name] != name:
                return None
            shapes[int(found[1])].append((found[2], shape))
    settings = _settings(config, number).values()
    kinds = (
        (*_plain(mine), fact, *(str(values[i]) for values in settings))
        for i, (mine, fact) in enumerate(zip(shapes, facts, strict=True))
    )
    return Layers(lists[0], tuple(kinds))


def sample(config: Any, layers: Layers) -> Sample | None:
    """The smallest sample; None where it would be the whole model."""
    number = len(layers.kinds)
    middle = range(1, number - 1)
    firsts = {layers.kinds[i]: i for i in reversed(middle)}
    picks = (0, *sorted(firsts.values()), number - 1)
    if len(picks) >= number:
        return None
    often = Counter(layers.kinds[i] for i in middle)
    counts = (1, *(often[layers.kinds[i]] for i in picks[1:-1]), 1)
    short = copy.deepcopy(config)
    for name, values in _settings(config, number).items():
        setattr(short, name, type(values)(values[i] for i in picks))
    short.num_hidden_layers = len(picks)
    return Sample(short, layers.prefix, picks, counts)


def is_like(made: Layers | None, of: Layers, picks: Sequence[int]) -> bool:
    """Whether the layers that a sample came out with are those that it was to have."""
    return made == Layers(of.prefix, tuple(of.kinds[i] for i in picks))


def _settings(config: Any, number: int) -> dict[str, list[Any] | tuple[Any, ...]]:
    """What the configuration says layer by layer."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == number
    }


def _plain(shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(sorted(shapes))
