"""What flows in and out of a model's linear modules while it reads a text.

For each module inside a decoder layer: the second moment of its inputs, what per-token int8
rounding does to them, and the Fisher information of its outputs. With those three, the harm of a
change E of a weight is known without running the model again:

    KL(model || changed model) of a token  ~  1/2 sum_n fisher[n] * (E moment E^T)[n, n]

the second-order expansion with inputs and output gradients taken as independent (Martens & Grosse,
"Optimizing Neural Networks with Kronecker-factored Approximate Curvature", arXiv 1503.05671).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtllm_lite.exporter.reference import LAYER
from trtllm_lite.runtime.progress import Progress

Array = npt.NDArray[Any]
# Every so many windows also run backward, for the Fisher information: it varies far less than a
# moment needs samples.
BACKWARD_EVERY = 4
LEVELS = 127


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Of the K features that enter one or more modules, over `tokens` tokens.

    moment: mean of x x^T, float32 [K, K], or None when there was no room for it. power: its
    diagonal, [K]. rounding: mean square of what per-token symmetric int8 rounding changes, [K].
    """

    tokens: int
    power: torch.Tensor
    rounding: torch.Tensor
    moment: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class LinearStatistics:
    """Of one module. Modules that read the same tensor share `inputs`.

    fisher: mean square of the gradient of a token's log-likelihood with respect to each output,
    float32 [N], under the model's own predictions.
    """

    inputs: InputStatistics
    fisher: torch.Tensor


Statistics = Mapping[str, LinearStatistics]


def layer_linears(model: Any) -> dict[str, torch.nn.Linear]:
    """The linear modules inside of decoder layers, by name."""
    layers = [name for name, _ in model.named_modules() if LAYER.search(name)]
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(name.startswith(f"{x}.") for x in layers)
    }


def moment_bytes(model: Any) -> int:
    """Memory of all moments, when no two modules share their inputs: an upper bound."""
    return sum(4 * x.in_features**2 for x in layer_linears(model).values())


def collect(
    model: Any, windows: Array, progress: Progress, *, with_moments: bool = True
) -> Statistics:
    """Run the model over `windows` [count, length] of token ids and gather the statistics, by
    parameter name. A module that no token reached is not among them.

    The parameters of the model do not ask for gradients any more when this returns.
    """
    collector = _Collector(with_moments)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    with _hooked(model, collector):
        for index, window in enumerate(windows):
            backward = index % BACKWARD_EVERY == 0
            with torch.set_grad_enabled(backward):
                ids = torch.from_numpy(np.asarray(window, np.int64)[None])
                logits = model(input_ids=ids, use_cache=False).logits[0].float()
                if backward:
                    torch.autograd.backward(_own_log_likelihood(logits, generator))
            progress.advance(index + 1, len(windows), "windows of text")
    return collector.statistics()


def _own_log_likelihood(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Of tokens drawn from the predictions themselves: the expected square of its gradient is the
    curvature of the divergence."""
    logp = torch.log_softmax(logits, dim=-1)
    drawn = torch.multinomial(logp.detach().exp(), 1, generator=generator)
    return logp.gather(1, drawn).sum()


class _Collector:
    """Sums over the tokens of all windows. The inputs of a module are gathered by the first module
    that is given the same tensor, its owner."""

    def __init__(self, with_moments: bool) -> None:
        self._with_moments = with_moments
        self._owner: dict[str, str] = {}
        self._last: tuple[str, Any] | None = None
        self._inputs: dict[str, _Sums] = {}
        self._fisher: dict[str, tuple[int, torch.Tensor]] = {}

    def forward(self, name: str, x: torch.Tensor, output: Any) -> None:
        if self._last is None or self._last[1] is not x:
            self._last = (name, x)
        owner = self._owner.setdefault(name, self._last[0])
        if owner == name and x.numel():
            sums = self._inputs.setdefault(name, _Sums(x.shape[-1], self._with_moments))
            sums.add(x.detach().flatten(0, -2).float())
        if output.requires_grad:
            output.register_hook(lambda gradient: self._backward(name, gradient))

    def _backward(self, name: str, gradient: torch.Tensor) -> None:
        rows = gradient.flatten(0, -2).float()
        count, total = self._fisher.get(name, (0, torch.zeros(rows.shape[1])))
        self._fisher[name] = count + len(rows), total + rows.square().sum(0)

    def statistics(self) -> Statistics:
        inputs = {name: sums.means() for name, sums in self._inputs.items()}
        return {
            f"{name}.weight": LinearStatistics(inputs[owner], _mean(*self._fisher[name]))
            for name, owner in self._owner.items()
            if owner in inputs and name in self._fisher
        }


class _Sums:
    def __init__(self, features: int, with_moments: bool) -> None:
        self._tokens = 0
        self._power = torch.zeros(features)
        self._rounding = torch.zeros(features)
        self._moment = torch.zeros(features, features) if with_moments else None

    def add(self, x: torch.Tensor) -> None:
        self._tokens += len(x)
        self._power += x.square().sum(0)
        self._rounding += (x - rounded_per_token(x)).square_().sum(0)
        if self._moment is not None:
            self._moment.addmm_(x.t(), x)

    def means(self) -> InputStatistics:
        moment = None if self._moment is None else self._moment.div_(self._tokens)
        n = self._tokens
        return InputStatistics(n, self._power / n, self._rounding / n, moment)


def rounded_per_token(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, K] as symmetric int8 with one scale a token, back in float32."""
    scale = x.abs().amax(1, keepdim=True) / LEVELS
    scale[scale == 0] = 1
    return (x / scale).round_().mul_(scale)


def _mean(count: int, total: torch.Tensor) -> torch.Tensor:
    return total / count


@contextmanager
def _hooked(model: Any, collector: _Collector) -> Iterator[None]:
    def watch(name: str, module: torch.nn.Linear) -> Any:
        return module.register_forward_hook(
            lambda _module, args, output: collector.forward(name, args[0], output)
        )

    def ask_for_gradients(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    handles = [watch(name, module) for name, module in layer_linears(model).items()]
    handles.append(model.get_input_embeddings().register_forward_hook(ask_for_gradients))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
