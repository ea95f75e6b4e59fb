"""The session on ONNX Runtime, the KV cache bound in place.

The same `OrtValue` over `pool[first : first + rows]` is bound as past and as present: the attention
kernels then append to it where it lies, and a step's cost does not grow with the pool. Facts this
rests on, measured with ONNX Runtime 1.32: `ortvalue_from_numpy` aliases the array it is given; a
slice along the slots is contiguous, so it aliases the pool itself.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.base import Array, Batch, KVBlock, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.contract import check_batch
from trtllm_lite.runtime.backends.graph_io import GraphIO, token_inputs
from trtllm_lite.runtime.backends.kv_pool import NUMPY_DTYPES, KVPool
from trtllm_lite.runtime.backends.phases import graph_for
from trtllm_lite.runtime.errors import EngineDeadError, RunInterruptedError, StepError
from trtllm_lite.runtime.manifest import Phase, TensorSpec

BFLOAT16 = 16
"""onnx.TensorProto.BFLOAT16"""

MAX_BINDINGS = 64


def one_line(error: Exception) -> str:
    """The text of an error of ONNX Runtime without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, eq=False)
class LoadedGraph:
    """A loaded graph and its table. `weights`: what has to live as long as the session does.
    `least_tokens`: a row is filled up to as many."""

    io: GraphIO
    session: Any
    weights: Sequence[Any] = ()
    least_tokens: int = 1


@dataclass(eq=False)
class _Binding:
    """An IO binding over fixed rows of the pool. `inputs` are the arrays that its small inputs
    alias, `logits` is the one that its output goes to; `values` keeps every bound OrtValue, and
    with it the memory, alive."""

    io_binding: Any
    inputs: dict[str, Array] = field(default_factory=dict)
    logits: npt.NDArray[np.float32] | None = None
    values: dict[str, Any] = field(default_factory=dict)


def _filled_up(batch: Batch, least_tokens: int) -> Batch:
    missing = least_tokens - batch.token_ids.shape[1]
    if missing <= 0:
        return batch
    return replace(batch, token_ids=np.pad(batch.token_ids, ((0, 0), (0, missing))))


class OrtSession:
    """A `Session` on ONNX Runtime's CPU provider. It owns two inference sessions and the pool."""

    def __init__(
        self,
        ort: Any,
        graphs: Mapping[Phase, LoadedGraph],
        pool: KVPool,
        options: SessionOptions,
        info: SessionInfo,
    ) -> None:
        self._ort = ort
        self._graphs = graphs
        self._pool = pool
        self._options = options
        self._info = info
        self._bindings: OrderedDict[tuple[Phase, int, int], _Binding] = OrderedDict()
        self._prefill: Any = None
        """The ort.RunOptions of the prefill run that is going on."""
        self._vocab_size = int(graphs["decode"].io.logits.shape[2])
        self._logits = np.empty(options.num_slots * self._vocab_size, np.float32)

    @property
    def info(self) -> SessionInfo:
        return self._info

    @property
    def pool(self) -> KVPool:
        """The memory that the graphs are bound to."""
        return self._pool

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits [rows, num_logits, vocab], a view of a buffer that the next `run` overwrites.
        Raises StepError for a batch outside the contract and for whatever ONNX Runtime raises,
        RunInterruptedError after `interrupt`."""
        self._check_open()
        multi = self._info.multi_token_decode
        check_batch(batch, self._options, self._vocab_size, multi_token_decode=multi)
        graph = self._graphs.get(graph_for(batch, self._graphs))
        if graph is None:
            raise StepError(f"the session was opened without the {batch.phase} graph")
        batch = _filled_up(batch, graph.least_tokens)
        try:
            binding = self._binding(graph, batch.first_slot, batch.rows)
            inputs = token_inputs(batch)
            for spec in graph.io.tokens:
                self._feed(binding, spec, inputs[spec.role])
            logits = self._bind_logits(binding, graph, batch)
            self._run(graph, binding)
        except RunInterruptedError:
            raise
        except Exception as error:
            raise StepError(f"onnxruntime, {batch.phase}: {one_line(error)}") from error
        return logits

    def interrupt(self) -> None:
        # Every run has options of its own: those of one that has ended do nothing any more.
        options = self._prefill
        if options is not None:
            options.terminate = True

    def move(self, source: int, target: int, length: int) -> None:
        self._check_open()
        self._pool.move(source, target, length)

    def swap(self, a: int, b: int, length: int) -> None:
        self._check_open()
        self._pool.swap(a, b, length)

    def read(self, slot: int, spans: Sequence[tuple[int, int]]) -> list[KVBlock]:
        self._check_open()
        return self._pool.read(slot, spans)

    def write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        self._check_open()
        self._pool.write(slot, start, blocks)

    def release(self, slot: int) -> None:
        self._check_open()
        self._pool.release(slot)

    def close(self) -> None:
        self._bindings.clear()
        self._graphs = {}
        self._pool.close()
        self._logits = np.empty(0, np.float32)

    def _check_open(self) -> None:
        if not self._graphs:
            raise EngineDeadError("the session is closed")

    def _run(self, graph: LoadedGraph, binding: _Binding) -> None:
        """Decode runs are over before anybody could interrupt them."""
        if graph.io.phase != "prefill":
            graph.session.run_with_iobinding(binding.io_binding)
            return
        options = self._prefill = self._ort.RunOptions()
        try:
            graph.session.run_with_iobinding(binding.io_binding, options)
        except Exception:
            if options.terminate:
                raise RunInterruptedError("a prefill run was interrupted") from None
            raise
        finally:
            self._prefill = None

    def _binding(self, graph: LoadedGraph, first_slot: int, rows: int) -> _Binding:
        """The binding of these rows, made on first use; the least recently used one gives way."""
        key = (graph.io.phase, first_slot, rows)
        if key not in self._bindings:
            if len(self._bindings) >= MAX_BINDINGS:
                self._bindings.popitem(last=False)
            self._bindings[key] = self._bind_cache(graph, first_slot, rows)
        self._bindings.move_to_end(key)
        return self._bindings[key]

    def _bind_cache(self, graph: LoadedGraph, first_slot: int, rows: int) -> _Binding:
        io, binding = graph.io, _Binding(graph.session.io_binding())
        pairs = (
            *zip(io.past_keys, io.present_keys, self._pool.keys, strict=True),
            *zip(io.past_values, io.present_values, self._pool.values, strict=True),
        )
        for past, present, array in pairs:
            value = self._ort_value(array[first_slot : first_slot + rows], past.dtype)
            binding.io_binding.bind_ortvalue_input(past.name, value)
            binding.io_binding.bind_ortvalue_output(present.name, value)
            binding.values[past.name] = value
        return binding

    def _feed(self, binding: _Binding, spec: TensorSpec, array: Array) -> None:
        """Write into the bound buffer; a new one only where the shape has changed."""
        bound = binding.inputs.get(spec.name)
        if bound is not None and bound.shape == array.shape:
            bound[...] = array
            return
        bound = np.array(array, NUMPY_DTYPES[spec.dtype], order="C")
        value = self._ort_value(bound, spec.dtype)
        binding.io_binding.bind_ortvalue_input(spec.name, value)
        binding.inputs[spec.name] = bound
        binding.values[spec.name] = value

    def _bind_logits(
        self, binding: _Binding, graph: LoadedGraph, batch: Batch
    ) -> npt.NDArray[np.float32]:
        """The shared logits buffer, bound anew where its place or shape has changed. It is never
        bound to a device instead: that would keep the shape of its first run."""
        shape = (batch.rows, batch.logits_indices.shape[1], self._vocab_size)
        bound = binding.logits
        if bound is not None and bound.shape == shape and bound.base is self._logits:
            return bound
        size = shape[0] * shape[1] * shape[2]
        if self._logits.size < size:
            self._logits = np.empty(size, np.float32)
        logits = self._logits[:size].reshape(shape)
        name, value = graph.io.logits.name, self._ort_value(logits, "float32")
        binding.io_binding.bind_ortvalue_output(name, value)
        binding.values[name], binding.logits = value, logits
        return logits

    def _ort_value(self, array: Array, dtype: str) -> Any:
        """An OrtValue over the array's own memory."""
        if dtype == "bfloat16":
            return self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)
        return self._ort.OrtValue.ortvalue_from_numpy(array)
