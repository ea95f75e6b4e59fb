"""The least time that a machine can take, from its memory rate and its rate of multiplying.

Source: Williams, Waterman, Patterson, "Roofline", CACM 52 (2009).
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from trtllm_lite.runtime.planning.workload import Workload

Bound = Literal["memory", "compute"]


@dataclass(frozen=True)
class Estimate:
    """Seconds of one run of a graph, and what most of them go to."""

    seconds: float
    bound: Bound


class Machine(Protocol):
    """What `plan` asks of a machine. `rows` requests decode together with `context` tokens each; a
    prompt of `tokens` tokens is computed alone."""

    def step(self, workload: Workload, rows: int, context: int) -> Estimate: ...

    def prompt(self, workload: Workload, tokens: int) -> Estimate: ...


@dataclass(frozen=True)
class Roofline:
    """A machine that reads and multiplies at once, each at its full rate, and does nothing else.
    read: bytes a second. multiply: multiplications and additions a second."""

    read: float
    multiply: float

    def step(self, workload: Workload, rows: int, context: int) -> Estimate:
        """Every weight once, every row's cache once."""
        read = workload.step_bytes + rows * workload.kv_read_bytes(context)
        flops = rows * (workload.token_flops + workload.attention_flops(context))
        return self._longer(read, flops)

    def prompt(self, workload: Workload, tokens: int) -> Estimate:
        """Every weight once; the prompt's own keys and values stay close by."""
        flops = workload.prompt_flops(tokens) + workload.prompt_attention_flops(tokens)
        return self._longer(workload.step_bytes, flops)

    def _longer(self, read: float, flops: float) -> Estimate:
        reading, computing = read / self.read, flops / self.multiply
        bound: Bound = "memory" if reading >= computing else "compute"
        return Estimate(max(reading, computing), bound)
