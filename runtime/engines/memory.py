"""How much device memory plans take: what is exact before a build, and what the builder said after.

All sizes in bytes.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.profiles import EngineLimits
from trtllm_lite.runtime.engines.record import PlanRecord, SharedWeight
from trtllm_lite.runtime.manifest import DTYPE_BYTES, GraphSpec, Phase
from trtllm_lite.runtime.onnx_wire import external_data

What = Literal["weights", "scratch", "activation"]
_LINES: dict[What, str] = {
    "weights": "Total Weights Memory",
    "scratch": "Max Scratch Memory",
    "activation": "Total Activation Memory",
}


@dataclass(frozen=True)
class KVMemory:
    """The KV cache, which the plans do not hold and the runtime allocates: exact."""

    bytes_per_token: int
    num_slots: int
    capacity: int

    @property
    def total(self) -> int:
        return self.bytes_per_token * self.num_slots * self.capacity


@dataclass(frozen=True)
class PhaseMemory:
    """What one plan needs.

    file_weights: of the weights that the graph names and the plan holds, exact. logits: of the
    largest logits of a run, exact. weights, scratch, activation: as the builder reported them; None
    before a build, or where it did not say. Scratch is a part of activation.
    """

    phase: Phase
    file_weights: int
    logits: int
    weights: int | None = None
    scratch: int | None = None
    activation: int | None = None


@dataclass(frozen=True)
class Ledger:
    """The device memory of a set of plans with its KV cache. shared_weights: what all plans read
    in one place, exact."""

    phases: tuple[PhaseMemory, ...]
    kv: KVMemory
    shared_weights: int = 0

    @property
    def weights(self) -> int:
        """What is shared once, and what each plan has a copy of its own of."""
        own = sum(p.file_weights if p.weights is None else p.weights for p in self.phases)
        return self.shared_weights + own

    @property
    def activation(self) -> int | None:
        """Contexts share one block, as large as the largest needs; None before a build."""
        known = [p.activation for p in self.phases if p.activation is not None]
        return max(known) if len(known) == len(self.phases) else None

    @property
    def total(self) -> int:
        """Weights, KV, the largest logits, and activation as far as it is known."""
        logits = max(p.logits for p in self.phases)
        return self.weights + self.kv.total + logits + (self.activation or 0)


def ledger_before(
    bundle: Bundle,
    limits: EngineLimits,
    largest: dict[Phase, int],
    shared: Collection[SharedWeight] = (),
) -> Ledger:
    """What is known without a build. `largest`: of each plan, the most logits, over all rows, of a
    run. `shared`: the weights that plans do not hold."""
    manifest = bundle.manifest
    apart = {(w.offset, w.length) for w in shared}
    phases = tuple(
        PhaseMemory(
            phase,
            weights_of(bundle, manifest.graph(phase), apart),
            most * manifest.model.vocab_size * DTYPE_BYTES["float32"],
        )
        for phase, most in largest.items()
    )
    kv = KVMemory(manifest.kv.bytes_per_token, limits.max_num_seqs, limits.capacity)
    return Ledger(phases, kv, sum(length for _, length in apart))


def ledger_after(before: Ledger, plans: Iterable[PlanRecord]) -> Ledger:
    """The same with what the builder reported of each plan."""
    said = {plan.phase: plan for plan in plans}
    phases = tuple(
        PhaseMemory(
            p.phase,
            p.file_weights,
            p.logits,
            said[p.phase].weights_bytes,
            said[p.phase].scratch_bytes,
            said[p.phase].activation_bytes,
        )
        for p in before.phases
    )
    return Ledger(phases, before.kv, before.shared_weights)


def weights_of(bundle: Bundle, graph: GraphSpec, apart: Collection[tuple[int, int]] = ()) -> int:
    """Bytes of the weights that a graph names in other files, each once. `apart`: offset and length
    of those that do not count."""
    data = (bundle.folder / graph.file).read_bytes()
    places = {(x.location, x.offset, x.length) for x in external_data(data)}
    return sum(length for _, offset, length in places if (offset, length) not in apart)


def reported(lines: Iterable[str], what: What) -> int | None:
    """The largest size of that kind in the builder's log; None where there is none."""
    pattern = re.compile(re.escape(_LINES[what]) + r": (\d+) bytes")
    return max((int(m[1]) for line in lines if (m := pattern.search(line))), default=None)
