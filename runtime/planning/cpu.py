"""How long a CPU takes, from two rates that are measured on it and constants that were fitted once.

The constants are what remains of the recorded measurements (`docs/measurements/peers-*.json`, two
cores of a Zen 4 server) once reading the weights is taken out; a test holds the sum against them.
"""

from dataclasses import dataclass, replace

from trtllm_lite.runtime.planning.roofline import Bound, Estimate
from trtllm_lite.runtime.planning.workload import Workload


@dataclass(frozen=True)
class Kernels:
    """What a set of operators costs beside the memory rate.

    reading: the part of the measured memory rate that products reach. multiplying, row_multiplying,
    attending: rates of products of a prompt, of products of the rows of a step, and of attention,
    as multiples of float32 products of large matrices. layer_s: of a layer in every run.
    token_layer_s: of each token of a prompt in a layer. logit_s: of each of the vocabulary's
    entries, once a row.
    """

    reading: float
    multiplying: float
    row_multiplying: float
    attending: float
    layer_s: float
    token_layer_s: float
    logit_s: float


NATIVE = Kernels(
    reading=1.0,
    multiplying=2.8,
    row_multiplying=2.8,
    attending=1.4,
    layer_s=60e-6,
    token_layer_s=5e-6,
    logit_s=2.5e-9,
)
"""Our own, over weights in blocks of 8 or 4 bits."""
NATIVE_EXACT = replace(NATIVE, row_multiplying=1.75)
"""The same with exact rounding: where tokens are few, activations are multiplied with twice."""
ORT_INTEGER = Kernels(
    reading=0.92,
    multiplying=2.2,
    row_multiplying=2.2,
    attending=0.5,
    layer_s=150e-6,
    token_layer_s=5e-6,
    logit_s=2.5e-9,
)
"""ONNX Runtime's, over quantized weights."""
ORT_FLOAT = Kernels(
    reading=0.92,
    multiplying=1.0,
    row_multiplying=1.0,
    attending=0.5,
    layer_s=150e-6,
    token_layer_s=5e-6,
    logit_s=2.5e-9,
)
"""ONNX Runtime's, over float weights."""


@dataclass(frozen=True)
class Cpu:
    """A CPU and the operators that run on it. memory: bytes it reads a second. products: float32
    multiplications and additions a second, of large matrices, all threads together."""

    memory: float
    products: float
    kernels: Kernels

    def step(self, workload: Workload, rows: int, context: int) -> Estimate:
        """The first row's products hide behind the reading of the weights; the others' do not."""
        multiply = workload.token_flops / (self.products * self.kernels.row_multiplying)
        reading = workload.step_bytes / (self.memory * self.kernels.reading)
        computing = (rows - 1) * multiply + rows * self._attention(workload, context)
        bound: Bound = "memory" if reading >= computing else "compute"
        seconds = max(reading, multiply) + computing + self._fixed(workload, rows)
        return Estimate(seconds, bound)

    def prompt(self, workload: Workload, tokens: int) -> Estimate:
        """Products, attention and what each token costs a layer, one after the other."""
        reading = workload.step_bytes / (self.memory * self.kernels.reading)
        multiply = workload.prompt_flops(tokens) / (self.products * self.kernels.multiplying)
        attend = workload.prompt_attention_flops(tokens)
        others = tokens * len(workload.layers) * self.kernels.token_layer_s
        computing = multiply + attend / (self.products * self.kernels.attending) + others
        bound: Bound = "memory" if reading >= multiply else "compute"
        hidden = max(0.0, reading - multiply)
        return Estimate(computing + hidden + self._fixed(workload, 1), bound)

    def _attention(self, workload: Workload, context: int) -> float:
        """Seconds of one row: the cache is read, and multiplied with."""
        reading = workload.kv_read_bytes(context) / self.memory
        rate = self.products * self.kernels.attending
        return reading + workload.attention_flops(context) / rate

    def _fixed(self, workload: Workload, rows: int) -> float:
        logits = rows * workload.vocab_size * self.kernels.logit_s
        return len(workload.layers) * self.kernels.layer_s + logits
