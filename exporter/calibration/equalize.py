"""Features of very different size, evened out before they are rounded to 8 bits.

A few features are far larger than all others, and a token's or a block's int8 scale follows the
largest. Feature k leaves where it is made divided by c[k] and meets weights that are multiplied by
c[k]: the model is the same, but part of the difficulty has moved from the activations into the
weights (Xiao et al., "SmoothQuant", arXiv 2211.10438). Makers are norms, and projections of which
the output stays linear up to the next one (values, the factor of a gate). The c[k] are powers of
two, so float32 results stay as they were, bit by bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtllm_lite.exporter.calibration.rounding_trial import Rounding, RoundingTrial
from trtllm_lite.exporter.calibration.scaling import Scaling
from trtllm_lite.exporter.calibration.statistics import layer_linears
from trtllm_lite.runtime.progress import Progress

Array = npt.NDArray[Any]
Tensor = torch.Tensor
Watcher = Callable[[str, Any, Any], None]

# How much of a feature's size moves into the weights: halfway in the exponent, as in the paper.
STRENGTH = 0.5
LARGEST_EXPONENT = 8
# Largest features are soon seen: more windows change little.
WINDOWS = 6
PROBE_TOKENS = 16
TINY = 1e-6
# Largest change of a logit, relative to the largest one, that is only float32 sums rounding anew.
SAME = 1e-4


@dataclass(eq=False)
class _Link:
    """A module that makes features, what it adds to its weight, and the linear modules that read
    them. origin: which of the maker's S features each of the readers' K is, or comes from; largest:
    magnitude of each of the K seen so far."""

    maker: str
    shift: float = 0.0
    readers: list[str] = field(default_factory=list)
    origin: Tensor | None = None
    largest: Tensor | None = None

    @property
    def role(self) -> tuple[bool, str, str]:
        """The same for all layers. Projections sort before norms: what they do to their rows is
        then seen by the norm that they read."""
        return self.origin is None, _last(self.maker), _last(self.readers[0])


def equalize(
    model: Any, windows: Array, progress: Progress, roundings: Sequence[Rounding] = ()
) -> Mapping[str, Scaling]:
    """Even out what the model's linear modules read, in place, and say how its parameters changed,
    by name. windows: token ids [count, length]; the first few are read, and the last.

    Whether a maker's features go to its readers, linearly and to nothing else, is tried: a change
    is taken back for all layers when the model's predictions are not the same, or when `roundings`,
    taken together, cost more with it than without.
    """
    with torch.no_grad():
        trial = RoundingTrial(model, windows, roundings)
        links = [*_norm_links(model, windows[:1, :PROBE_TOKENS]), *_projection_links(model)]
        _watch(model, links, windows[:WINDOWS], progress)
        scalings: dict[str, Scaling] = {}
        least = trial.loss()
        for role in sorted({link.role for link in links}):
            found = _scalings(model, [x for x in links if x.role == role])
            loss = _try(model, found, windows[:1, :PROBE_TOKENS], trial, least)
            if loss is not None:
                least = loss
                for name, new in found.items():
                    scalings[name] = scalings[name].then(new) if name in scalings else new
    return scalings


def _norm_links(model: Any, ids: Array) -> list[_Link]:
    """Norms, and the linear modules that are given the very tensor that a norm returned."""
    modules = dict(model.named_modules())
    shifts = {name: _shift(module) for name, module in modules.items()}
    links = {name: _Link(name, shift) for name, shift in shifts.items() if shift is not None}
    # Tensors are kept, so that no other one is taken for them.
    made: list[tuple[str, Any]] = []

    def returned(name: str, _args: Any, output: Any) -> None:
        made.append((name, output))

    def read(name: str, args: Any, _output: Any) -> None:
        for norm, output in made:
            if output is args[0] and name not in links[norm].readers:
                links[norm].readers.append(name)

    norms = {modules[n]: (n, returned) for n in links}
    with _hooked(norms), _hooked({m: (n, read) for n, m in layer_linears(model).items()}):
        _logits(model, ids)
    return [link for link in links.values() if link.readers]


def _projection_links(model: Any) -> list[_Link]:
    """Every two linear modules of one parent whose widths fit: candidates, no more."""
    linears = layer_linears(model)
    links = []
    for reader, module in linears.items():
        parent = reader.rpartition(".")[0]
        for maker in linears:
            if maker != reader and maker.rpartition(".")[0] == parent:
                origin = _origin(model.get_submodule(parent), linears[maker], module)
                if origin is not None:
                    links.append(_Link(maker, readers=[reader], origin=origin))
    return links


def _origin(parent: Any, maker: torch.nn.Linear, reader: torch.nn.Linear) -> Tensor | None:
    """Which output of the maker each input of the reader would be; None when it cannot be. Heads
    of queries share the value head of their group."""
    groups, rest = divmod(reader.in_features, maker.out_features)
    places = torch.arange(reader.in_features)
    if rest or groups == 0:
        return None
    if groups == 1:
        return places
    dim: int | None = getattr(parent, "head_dim", None)
    return None if dim is None else places // dim // groups * dim + places % dim


def _shift(module: Any) -> float | None:
    """0 for a norm that multiplies by its weight, 1 for one that multiplies by one plus it, None
    for what is no norm. Seen from what it does to features of equal size."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.ndim != 1 or len(weight) < 2:
        return None
    probe = torch.ones(1, 1, len(weight))
    probe[..., ::2] = -1
    try:
        gain = ((module(probe) - module(-probe)) / (2 * probe)).flatten()
    except (RuntimeError, TypeError, ValueError):
        return None
    for shift in (0.0, 1.0):
        if gain.shape == weight.shape and torch.allclose(
            gain, weight + shift, rtol=1e-3, atol=1e-5
        ):
            return shift
    return None


def _watch(model: Any, links: list[_Link], windows: Array, progress: Progress) -> None:
    """Fill in `largest` of every link."""
    modules = dict(model.named_modules())
    first = {link.readers[0] for link in links}
    largest: dict[str, Tensor] = {}

    def see(name: str, args: Any, _output: Any) -> None:
        seen = args[0].abs().flatten(0, -2).amax(0)
        largest[name] = torch.maximum(largest[name], seen) if name in largest else seen

    with _hooked({modules[name]: (name, see) for name in first}):
        for index, window in enumerate(windows):
            _logits(model, window[None])
            progress.advance(index + 1, len(windows), "windows of text")
    for link in links:
        link.largest = largest.get(link.readers[0])


def _scalings(model: Any, links: list[_Link]) -> dict[str, Scaling]:
    """For every parameter of the links: makers are divided, what reads them is multiplied."""
    made: dict[str, Scaling] = {}
    names = dict(model.named_parameters())
    for link in links:
        if link.largest is None:
            continue
        readers = [f"{name}.weight" for name in link.readers]
        weights = torch.cat([names[name] for name in readers]).abs().amax(0)
        factors, spread = _factors(link, link.largest, weights)
        made[f"{link.maker}.weight"] = Scaling(rows=1 / factors, shift=link.shift)
        if f"{link.maker}.bias" in names:
            made[f"{link.maker}.bias"] = Scaling(rows=1 / factors)
        made |= {name: Scaling(columns=spread) for name in readers}
    return made


def _factors(link: _Link, features: Tensor, weights: Tensor) -> tuple[Array, Array]:
    """Powers of two, for the maker's features and spread over the readers', from the largest
    magnitudes of the readers' features and of their weights, [K] each."""
    origin = torch.arange(len(features)) if link.origin is None else link.origin
    count = int(origin.max()) + 1
    sizes = [
        torch.zeros(count).scatter_reduce(0, origin, x, "amax").clamp(min=TINY).log2()
        for x in (features, weights)
    ]
    exponents = STRENGTH * sizes[0] - (1 - STRENGTH) * sizes[1]
    exponents = (exponents - exponents.mean()).round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    factors = exponents.exp2()
    return factors.numpy(), factors[origin].numpy()


def _try(
    model: Any, scalings: Mapping[str, Scaling], ids: Array, trial: RoundingTrial, least: float
) -> float | None:
    """Apply the scalings to the model and say what its rounding then costs. When that is more than
    `least`, or the predictions change, take them back: None."""
    before = _logits(model, ids)
    kept = {name: model.get_parameter(name).clone() for name in scalings}
    for name, scaling in scalings.items():
        parameter = model.get_parameter(name)
        changed = scaling.applied([parameter.detach().numpy().reshape(-1)], tuple(parameter.shape))
        parameter.copy_(torch.from_numpy(next(changed)).view_as(parameter))
    after = _logits(model, ids)
    if torch.allclose(after, before, rtol=0, atol=SAME * float(before.abs().max())):
        loss = trial.loss()
        if loss <= least:
            return loss
    for name, values in kept.items():
        model.get_parameter(name).copy_(values)
    return None


def _logits(model: Any, ids: Array) -> Tensor:
    tokens = torch.from_numpy(np.asarray(ids, np.int64))
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


@contextmanager
def _hooked(watchers: Mapping[Any, tuple[str, Watcher]]) -> Iterator[None]:
    """Each module's watcher is called with the name, the arguments and the output of every call."""

    def add(module: Any, name: str, watch: Watcher) -> Any:
        return module.register_forward_hook(lambda _module, args, out: watch(name, args, out))

    handles = [add(module, name, watch) for module, (name, watch) in watchers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _last(name: str) -> str:
    return name.rpartition(".")[2]
