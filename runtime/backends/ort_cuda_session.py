"""The session on ONNX Runtime's CUDA provider: KV in one allocation on the device, bound in place.

Everything is bound by its address: the small inputs, which one copy takes to the device, the cache,
as input and as output at once, and the logits, which one copy brings back: all of them, or only the
largest where no others matter. So ONNX Runtime copies nothing by itself, and a decode run of so
many rows always has the same addresses and shapes, which its CUDA graphs need. They are captured by
ONNX Runtime, one for each `gpu_graph_id`.
Source: ONNX Runtime, CUDA execution provider, "Using CUDA Graphs".
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.base import Array, Batch, KVBlock, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.best_only import BestOnly
from trtllm_lite.runtime.backends.contract import check_batch
from trtllm_lite.runtime.backends.cuda_runs import Run, runs, with_spare_rows
from trtllm_lite.runtime.backends.device import Device, DeviceError
from trtllm_lite.runtime.backends.device_buffers import Staging, float_view, put
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.graph_io import GraphIO, token_inputs
from trtllm_lite.runtime.backends.kv_pool import NUMPY_DTYPES
from trtllm_lite.runtime.backends.ort_session import BFLOAT16, one_line
from trtllm_lite.runtime.backends.recorded_runs import MAX_RECORDED, rows_to_run
from trtllm_lite.runtime.errors import EngineDeadError, RunInterruptedError, StepError

HOST = "cpu"
LONGEST = "max_total_len"
FIRST_INPUT_BYTES = 64 * 1024
NOT_CAPTURED = -1
"""The `gpu_graph_id` of a run that is not to become a CUDA graph."""


@dataclass(frozen=True, eq=False)
class LoadedStep:
    """The loaded graph, which serves both phases, and its table. `provider`: "cuda", or "cpu" for
    a proof without a GPU; `captures`: whether decode runs become CUDA graphs."""

    session: Any
    io: GraphIO
    longest: int
    provider: Literal["cuda", "cpu"]
    captures: bool


@dataclass(frozen=True, eq=False)
class _Bound:
    """An IO binding and the array in host memory that it reads."""

    binding: Any
    longest: Array


class OrtCudaSession:
    """A `Session` on a GPU. It owns the inference session, the pool and the device."""

    def __init__(
        self,
        ort: Any,
        step: LoadedStep,
        device: Device,
        pool: DevicePool,
        options: SessionOptions,
        info: SessionInfo,
    ) -> None:
        self._ort = ort
        self._step: LoadedStep | None = step
        self._device = device
        self._pool = pool
        self._options = options
        self._info = info
        self._vocab_size = int(step.io.logits.shape[2])
        self._inputs, self._logits, self._top = Staging(device), Staging(device), Staging(device)
        self._best = BestOnly(self._vocab_size, int(step.io.top[0].shape[2]))
        self._inputs.grow(FIRST_INPUT_BYTES)
        self._logits.grow(options.num_slots * self._vocab_size * 4)
        self._top.grow(self._best.nbytes(options.num_slots))
        self._leading: dict[int, _Bound] = {}
        """Bindings of decode runs from slot 0 on, by their number of rows."""
        self._leading_at = self._addresses
        self._occupied: set[int] = set()
        """Slots that may hold what is still needed."""
        self._going: Any = None
        """The ort.RunOptions of the prefill run that is going on."""

    @property
    def info(self) -> SessionInfo:
        return self._info

    @property
    def pool(self) -> DevicePool:
        """The memory that the graph is bound to."""
        return self._pool

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits [rows, num_logits, vocab], a view of a buffer that the next `run` overwrites.
        Raises StepError for a batch outside the contract and for whatever the device or ONNX
        Runtime raises, RunInterruptedError after `interrupt`."""
        step = self._opened()
        check_batch(batch, self._options, self._vocab_size, multi_token_decode=False)
        parts = list(runs(batch, step.longest))
        try:
            if len(parts) == 1:
                return self._run(step, parts[0])
            shape = (*batch.logits_indices.shape, self._vocab_size)
            result = np.empty(shape, np.float32)
            for part in parts:
                result[part.row : part.row + part.batch.rows] = self._run(step, part)
            return result
        except RunInterruptedError:
            raise
        except Exception as error:
            # Nothing may stay queued that reads a buffer which the next run writes.
            with suppress(DeviceError):
                self._device.synchronize()
            raise StepError(f"onnxruntime, {batch.phase}: {one_line(error)}") from error

    def interrupt(self) -> None:
        # Every run has options of its own: those of one that has ended do nothing any more.
        options = self._going
        if options is not None:
            options.terminate = True

    def move(self, source: int, target: int, length: int) -> None:
        self._opened()
        self._pool.move(source, target, length)
        self._occupied.add(target)

    def swap(self, a: int, b: int, length: int) -> None:
        self._opened()
        self._pool.swap(a, b, length)
        self._occupied |= {a, b}

    def read(self, slot: int, spans: Sequence[tuple[int, int]]) -> list[KVBlock]:
        self._opened()
        return self._pool.read(slot, spans)

    def write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        self._opened()
        self._occupied.add(slot)
        self._pool.write(slot, start, blocks)

    def release(self, slot: int) -> None:
        self._opened()
        self._occupied.discard(slot)

    def close(self) -> None:
        """The inference session goes before the memory that it is bound to."""
        if self._step is None:
            return
        self._leading.clear()
        self._step = None
        self._device.close()

    def _opened(self) -> LoadedStep:
        if self._step is None:
            raise EngineDeadError("the session is closed")
        self._device.use()
        return self._step

    @property
    def _addresses(self) -> tuple[int, ...]:
        return tuple(x.generation for x in (self._inputs, self._logits, self._top))

    def _run(self, step: LoadedStep, run: Run) -> npt.NDArray[np.float32]:
        batch, (rows, wanted) = run.batch, run.batch.logits_indices.shape
        is_leading = batch.phase == "decode" and batch.first_slot == 0
        if is_leading and step.captures:
            spare = rows_to_run(rows, self._options.num_slots, self._occupied)
            batch = with_spare_rows(batch, spare)
        self._occupied.update(range(batch.first_slot, batch.first_slot + rows))
        host = self._logits.grow(batch.rows * wanted * self._vocab_size * 4)
        top = self._top.grow(self._best.nbytes(batch.rows * wanted))
        at = put(self._inputs, arrays := _arrays(step.io, batch))
        if is_leading:
            bound = self._leading_binding(step, batch, arrays, at)
        else:
            bound = self._bind(step, batch, arrays, at)
        bound.longest[0] = run.max_total_len
        self._execute(step, bound, batch, captured=is_leading)
        if self._best.is_enough(batch.candidates):
            self._top.download(self._best.nbytes(batch.rows * wanted))
            self._device.synchronize()
            return self._best.logits(top.array, batch.rows, wanted)[:rows]
        self._logits.download(rows * wanted * self._vocab_size * 4)
        self._device.synchronize()
        return float_view(host, (rows, wanted, self._vocab_size))

    def _leading_binding(
        self, step: LoadedStep, batch: Batch, arrays: dict[str, Array], at: dict[str, int]
    ) -> _Bound:
        if self._leading_at != self._addresses:
            self._leading.clear()
            self._leading_at = self._addresses
        if batch.rows not in self._leading:
            self._leading[batch.rows] = self._bind(step, batch, arrays, at)
        return self._leading[batch.rows]

    def _bind(
        self, step: LoadedStep, batch: Batch, arrays: dict[str, Array], at: dict[str, int]
    ) -> _Bound:
        """The cache has the same addresses as past and as present: it is updated where it lies."""
        io, where = step.io, (step.provider, 0)
        bound = _Bound(step.session.io_binding(), np.zeros(1, np.int32))
        binding = bound.binding
        for name, array in arrays.items():
            binding.bind_input(name, *where, array.dtype.type, array.shape, at[name])
        longest = bound.longest
        place = longest.ctypes.data
        binding.bind_input(LONGEST, HOST, 0, longest.dtype.type, longest.shape, place)
        pasts, presents = (*io.past_keys, *io.past_values), (*io.present_keys, *io.present_values)
        addresses = (*self._pool.keys(batch.first_slot), *self._pool.values(batch.first_slot))
        for past, present, address in zip(pasts, presents, addresses, strict=True):
            kind, heads, size = element_type(past.dtype), past.shape[1], past.shape[3]
            shape = (batch.rows, heads, self._pool.capacity, size)
            binding.bind_input(past.name, *where, kind, shape, address)
            binding.bind_output(present.name, *where, kind, shape, address)
        rows, wanted = batch.logits_indices.shape
        every, few = (rows, wanted, self._vocab_size), (rows, wanted, self._best.count)
        binding.bind_output(io.logits.name, *where, np.float32, every, self._logits.address)
        for spec, offset in zip(io.top, self._best.places(rows * wanted), strict=True):
            kind, place = NUMPY_DTYPES[spec.dtype], self._top.address + offset
            binding.bind_output(spec.name, *where, kind, few, place)
        return bound

    def _execute(self, step: LoadedStep, bound: _Bound, batch: Batch, *, captured: bool) -> None:
        options = self._ort.RunOptions()
        if step.captures:
            captured = captured and batch.rows <= MAX_RECORDED
            number = self._graph_id(batch.rows) if captured else NOT_CAPTURED
            options.add_run_config_entry("gpu_graph_id", str(number))
        self._going = options if batch.phase == "prefill" else None
        try:
            step.session.run_with_iobinding(bound.binding, options)
        except Exception:
            if options.terminate:
                raise RunInterruptedError("a prefill run was interrupted") from None
            raise
        finally:
            self._going = None

    def _graph_id(self, rows: int) -> int:
        """Another one when an address has changed: a captured graph keeps those that it had."""
        return sum(self._addresses) * (MAX_RECORDED + 1) + rows


def _arrays(io: GraphIO, batch: Batch) -> dict[str, Array]:
    """The small inputs that go to the device, by name."""
    given = token_inputs(batch)
    return {
        spec.name: np.ascontiguousarray(given[spec.role], NUMPY_DTYPES[spec.dtype])
        for spec in io.tokens
        if spec.role != LONGEST
    }


def element_type(dtype: str) -> Any:
    """As IO bindings take it: a numpy type, or the number that ONNX has for it."""
    return BFLOAT16 if dtype == "bfloat16" else NUMPY_DTYPES[dtype]
