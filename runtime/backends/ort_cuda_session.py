"""The session on ONNX Runtime's CUDA provider: KV in one allocation on the device, bound in place.

Everything is bound by its address: the small inputs, which one copy takes to the device, the cache,
as input and as output at once, and the logits, which one copy brings back: all of them, or only the
largest where those decide. So ONNX Runtime copies nothing by itself, and a decode run of so
many rows always has the same addresses and shapes, which its CUDA graphs need. They are captured by
ONNX Runtime, one for each `gpu_graph_id`.
Source: ONNX Runtime, CUDA execution provider, "Using CUDA Graphs".
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trtllm_lite.runtime.backends.base import Array, Batch, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.batch_pieces import Piece
from trtllm_lite.runtime.backends.best_only import BestOnly
from trtllm_lite.runtime.backends.cuda_errors import says_lost
from trtllm_lite.runtime.backends.cuda_runs import max_total_len, runs
from trtllm_lite.runtime.backends.device import Device
from trtllm_lite.runtime.backends.device_buffers import Staging, float_view, put
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.device_session import F32, DeviceSession, is_leading
from trtllm_lite.runtime.backends.graph_io import GraphIO, token_arrays
from trtllm_lite.runtime.backends.ort_bound import BoundRuns, logits_bytes
from trtllm_lite.runtime.backends.ort_session import one_line
from trtllm_lite.runtime.backends.recorded_runs import MAX_RECORDED, bucket

_log = logging.getLogger(__name__)

LONGEST = "max_total_len"
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


class OrtCudaSession(DeviceSession):
    """A `Session` on a GPU. It owns the inference session too."""

    def __init__(
        self,
        ort: Any,
        step: LoadedStep,
        device: Device,
        pool: DevicePool,
        options: SessionOptions,
        info: SessionInfo,
    ) -> None:
        super().__init__(device, pool, options, info, int(step.io.logits.shape[2]))
        self._step = step
        self._runs = BoundRuns(ort, pool, (step.provider, 0), self._check_wanted)
        self._top = Staging(device)
        self._best = BestOnly(self._vocab_size, int(step.io.top[0].shape[2]))
        self._top.grow(self._best.nbytes(options.num_slots))
        self._leading: dict[int, _Bound] = {}
        """Bindings of decode runs from slot 0 on, by their number of rows."""
        self._captures = step.captures
        """Whether more runs are to become CUDA graphs."""
        self._captured: set[int] = set()
        """The `gpu_graph_id` of each CUDA graph that is whole."""
        self._leading_at = self._addresses

    def interrupt(self) -> None:
        super().interrupt()
        self._runs.interrupt()

    def _pieces(self, batch: Batch) -> Sequence[Piece]:
        return list(runs(batch))

    def _drop(self) -> None:
        self._leading.clear()
        del self._step

    @property
    def _addresses(self) -> tuple[int, ...]:
        return tuple(x.generation for x in (self._inputs, self._logits, self._top))

    def _run(self, batch: Batch) -> F32:
        step, (rows, wanted) = self._step, batch.logits_indices.shape
        leads = is_leading(batch)
        if leads and step.captures:
            batch = self._with_free_rows(batch, self._options.num_slots)
        host = self._logits.grow(logits_bytes(batch, self._vocab_size))
        top = self._top.grow(self._best.nbytes(batch.rows * wanted))
        arrays = token_arrays((x for x in step.io.tokens if x.role != LONGEST), batch)
        at = put(self._inputs, arrays)
        bind = self._leading_binding if leads else self._bind
        bound = bind(batch, arrays, at)
        bound.longest[0] = max_total_len(batch, step.longest)
        usual = bucket(batch.rows, self._options.num_slots) == batch.rows
        self._execute(bound, batch, usual=leads and usual)
        if self._best.is_enough(batch.candidates):
            of = batch.rows * wanted
            self._top.download(self._best.nbytes(of))
            self._device.synchronize()
            if self._best.decides(top.array, rows * wanted, batch.candidates, of):
                return self._best.logits(top.array, batch.rows, wanted)[:rows]
        self._logits.download(rows * wanted * self._vocab_size * 4)
        self._device.synchronize()
        return float_view(host, (rows, wanted, self._vocab_size))

    def _leading_binding(
        self, batch: Batch, arrays: dict[str, Array], at: dict[str, int]
    ) -> _Bound:
        if self._leading_at != self._addresses:
            self._leading.clear()
            self._leading_at = self._addresses
        if batch.rows not in self._leading:
            self._leading[batch.rows] = self._bind(batch, arrays, at)
        return self._leading[batch.rows]

    def _bind(self, batch: Batch, arrays: dict[str, Array], at: dict[str, int]) -> _Bound:
        io, binding, longest = self._step.io, self._step.session.io_binding(), np.zeros(1, np.int32)
        self._runs.bind(binding, io, batch, arrays, at)
        self._runs.bind_host(binding, LONGEST, longest)
        rows, wanted = batch.logits_indices.shape
        every, few = (rows, wanted, self._vocab_size), (rows, wanted, self._best.count)
        self._runs.bind_output(binding, io.logits.name, "float32", every, self._logits.address)
        for spec, offset in zip(io.top, self._best.places(rows * wanted), strict=True):
            place = self._top.address + offset
            self._runs.bind_output(binding, spec.name, spec.dtype, few, place)
        return _Bound(binding, longest)

    def _execute(self, bound: _Bound, batch: Batch, *, usual: bool) -> None:
        """The first run of a `gpu_graph_id` is captured. Where it fails, ONNX Runtime keeps what it
        had captured by then, takes it for the whole run and launches it from then on, without an
        error. So that number is not used again, and nothing more is captured."""
        number = self._graph_id(batch.rows) if usual else NOT_CAPTURED
        try:
            self._launch(bound, batch, number)
        except Exception as error:
            alone = number == NOT_CAPTURED or number in self._captured
            if alone or says_lost(str(error)):
                raise
            self._captures = False
            _log.warning("decode runs without CUDA graphs: %s", one_line(error))
            self._launch(bound, batch, NOT_CAPTURED)
        else:
            self._captured.add(number)

    def _launch(self, bound: _Bound, batch: Batch, number: int) -> None:
        entries = {"gpu_graph_id": str(number)} if self._step.provider == "cuda" else {}
        self._runs.run(self._step.session, bound.binding, batch, entries)

    def _graph_id(self, rows: int) -> int:
        """Another one when an address has changed: a captured graph keeps those that it had."""
        number = sum(self._addresses) * (MAX_RECORDED + 1) + rows
        known = number in self._captured
        return number if known or (self._captures and rows <= MAX_RECORDED) else NOT_CAPTURED
