"""What the checks are handed: the session under examination, the one it is held against, limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trtllm_lite.runtime.backends.base import KVBlock, Session
from trtllm_lite.tools.doctor_checks.drive import Logits
from trtllm_lite.tools.doctor_checks.result import CheckFailedError, Numbers

LIMITS: Mapping[str, float] = {"float32": 2e-4, "float16": 0.02, "bfloat16": 0.1}
"""Largest difference of a logit that arithmetic of a type explains, as a part of the reference's
largest magnitude. A rounding is 2**-11 in float16 and 2**-8 in bfloat16; what is allowed is about
the roundings of all layers, each as large as it can be, in one direction."""

SENSITIVITY = 3.0
"""A model can prove nothing unless another first token moves its logits by this many limits."""


@dataclass(frozen=True)
class Facts:
    """What is true of the subject. weight_bytes: that a decode step reads. kv_bytes: of one token.
    bandwidth: of the device's memory in bytes a second, None where it is not known. exact_graphs:
    whether a recorded step runs the kernels of one that is not, so that no bit may differ."""

    lane: str
    vocab_size: int
    num_slots: int
    capacity: int
    dtype: str
    weight_bytes: int
    kv_bytes: int
    bandwidth: float | None = None
    exact_graphs: bool = True

    @property
    def limit(self) -> float:
        return LIMITS[self.dtype]


class ReferenceModel(Protocol):
    """The same model, computed on the CPU in float32 by other code, one row at a time."""

    def logits(self, row: Sequence[int]) -> Logits:
        """Logits [tokens, vocab] after each token of a row."""

    def keys_values(self, row: Sequence[int]) -> KVBlock:
        """What a cache holds of a row, float32; keys with their rotation."""


class Bench(Protocol):
    """What was opened when it was first asked for stays open."""

    @property
    def facts(self) -> Facts: ...

    @property
    def subject(self) -> Session:
        """The session under examination."""

    @property
    def reference(self) -> ReferenceModel: ...


class Check(Protocol):
    """One thing to find out. `expected_s`: seconds that it takes on a GPU, with less of which it is
    not begun. `budget_s`: seconds after which it counts as failed."""

    name: str
    expected_s: float
    budget_s: float

    def run(self, bench: Bench) -> Numbers:
        """What was measured. Raises CheckFailedError, CheckSkippedError, or anything else."""


def distance(found: Logits, wanted: Logits) -> float:
    """The largest difference as a part of the largest magnitude of `wanted`; infinite where
    `found` has something that is no number."""
    if found.shape != wanted.shape:
        raise CheckFailedError(f"logits of shape {found.shape}; expected: {wanted.shape}")
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def farthest(found: Sequence[Logits], wanted: Sequence[Logits]) -> float:
    """The largest `distance` of pairs."""
    return max(distance(a, b) for a, b in zip(found, wanted, strict=True))


def within(facts: Facts, name: str, value: float, numbers: Numbers) -> None:
    """Note a distance, and raise CheckFailedError where it is more than arithmetic explains."""
    numbers[name] = value
    numbers["limit"] = facts.limit
    if not value <= facts.limit:
        raise CheckFailedError(f"{name} is {value:.3g}; limit: {facts.limit:.3g}", numbers)
