"""The session over TensorRT plans: KV in one allocation on the device, bound in place.

A run queues one copy of its small inputs, the execution, and one copy of the logits that are
wanted, on one stream, and waits once. Every context has memory of the same block. TensorRT
silently ignores what would be written beyond a slot, so the bounds are checked here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.base import Array, Batch, KVBlock, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.contract import check_batch
from trtllm_lite.runtime.backends.device import Device, DeviceError
from trtllm_lite.runtime.backends.device_buffers import Staging, float_view, put
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.graph_io import token_inputs
from trtllm_lite.runtime.backends.kv_pool import NUMPY_DTYPES
from trtllm_lite.runtime.backends.recorded_runs import RecordedRuns, rows_to_run
from trtllm_lite.runtime.backends.trt_pieces import Piece, RunLimits, filled_up, pieces
from trtllm_lite.runtime.backends.trt_plans import LoadedPlan, LoadedPlans, cache_pairs
from trtllm_lite.runtime.engines.trt_log import Messages
from trtllm_lite.runtime.errors import EngineDeadError, RunInterruptedError, StepError
from trtllm_lite.runtime.manifest import Phase

FIRST_INPUT_BYTES = 64 * 1024

F32 = npt.NDArray[np.float32]
Listening = Callable[[], AbstractContextManager[Messages]]


@dataclass(frozen=True, eq=False)
class Tools:
    """What a session works with. `listening`: hears what TensorRT logs, until it is left.
    `recorded`: decode runs become CUDA graphs."""

    device: Device
    listening: Listening
    recorded: bool = True


class TrtSession:
    """A `Session` on TensorRT. It owns the plans, the pool and the device."""

    def __init__(
        self,
        tools: Tools,
        plans: LoadedPlans,
        pool: DevicePool,
        options: SessionOptions,
        info: SessionInfo,
    ) -> None:
        self._device = device = tools.device
        self._plans: LoadedPlans | None = plans
        self._pool = pool
        self._options = options
        self._info = info
        self._listening = tools.listening
        self._limits: Mapping[Phase, RunLimits] = {p: x.limits for p, x in plans.plans.items()}
        self._vocab_size = int(plans["decode"].io.logits.shape[2])
        self._inputs, self._logits = Staging(device), Staging(device)
        self._inputs.grow(FIRST_INPUT_BYTES)
        self._logits.grow(options.num_slots * self._vocab_size * 4)
        self._recorded = RecordedRuns(device, wanted=tools.recorded)
        self._recorded_with = self._generations
        self._bound: dict[Phase, tuple[int, int]] = {}
        """First slot and rows that the cache tensors of each context are set to."""
        self._occupied: set[int] = set()
        """Slots that may hold what is still needed."""
        self._going: Event | None = None

    @property
    def info(self) -> SessionInfo:
        return self._info

    @property
    def pool(self) -> DevicePool:
        """The memory that the contexts are bound to."""
        return self._pool

    def run(self, batch: Batch) -> F32:
        """Logits [rows, num_logits, vocab], a view of a buffer that the next `run` overwrites.
        Raises StepError for a batch outside the contract and for whatever the device or TensorRT
        refuses, RunInterruptedError after `interrupt`."""
        plans = self._opened()
        multi = self._info.multi_token_decode
        check_batch(batch, self._options, self._vocab_size, multi_token_decode=multi)
        parts = pieces(batch, self._limits)
        self._going = Event() if batch.phase == "prefill" else None
        try:
            with self._listening() as heard:
                if len(parts) == 1:
                    return self._run(plans, parts[0].batch)
                return self._run_all(plans, parts, batch.logits_indices.shape)
        except RunInterruptedError:
            raise
        except Exception as error:
            self._settle()
            why = "; ".join((_one_line(str(error)), *map(_one_line, heard.errors[:1])))
            raise StepError(f"tensorrt, {batch.phase}: {why}") from error
        finally:
            self._going = None

    def interrupt(self) -> None:
        # Every run has an event of its own: those of one that has ended do nothing any more.
        going = self._going
        if going is not None:
            going.set()

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
        """Contexts go before the memory that they were given. A device that is broken is closed
        all the same."""
        if self._plans is None:
            return
        with suppress(DeviceError):
            self._device.use()
            self._recorded.clear()
        self._plans = None
        self._device.close()

    def _opened(self) -> LoadedPlans:
        if self._plans is None:
            raise EngineDeadError("the session is closed")
        self._device.use()
        return self._plans

    def _settle(self) -> None:
        """Let nothing stay queued that reads a buffer which the next run writes."""
        with suppress(DeviceError):
            self._device.synchronize()

    def _run_all(self, plans: LoadedPlans, parts: Sequence[Piece], shape: tuple[int, ...]) -> F32:
        """Several runs, and their logits put together."""
        result = np.empty((*shape, self._vocab_size), np.float32)
        for part in parts:
            if self._going is not None and self._going.is_set():
                raise RunInterruptedError("a prefill run was interrupted")
            logits = self._run(plans, part.batch)
            if part.columns is None:
                result[part.row : part.row + part.batch.rows] = logits
            else:
                result[part.row, list(part.columns)] = logits[0, list(part.picks)]
        return result

    def _run(self, plans: LoadedPlans, batch: Batch) -> F32:
        plan, rows, wanted = plans[batch.phase], *batch.logits_indices.shape
        batch = filled_up(batch, plan.limits, self._pool.capacity)
        is_leading = batch.phase == "decode" and batch.first_slot == 0
        if is_leading:
            most = min(self._options.num_slots, plan.limits.rows.most)
            batch = _with_spare_rows(batch, rows_to_run(rows, most, self._occupied))
        self._occupied.update(range(batch.first_slot, batch.first_slot + rows))
        arrays = _arrays(plan, batch)
        count = batch.logits_indices.shape[1]
        host = self._logits.grow(batch.rows * count * self._vocab_size * 4)
        addresses = put(self._inputs, arrays)
        if not (is_leading and self._launch(batch.rows)):
            self._bind(plan, batch, arrays, addresses)
            self._execute(plan)
        self._logits.download(rows * count * self._vocab_size * 4)
        self._device.synchronize()
        if is_leading and not self._recorded.has(batch.rows):
            self._recorded.record(batch.rows, lambda: self._execute(plan))
        return float_view(host, (rows, count, self._vocab_size))[:, :wanted]

    @property
    def _generations(self) -> tuple[int, int]:
        return self._inputs.generation, self._logits.generation

    def _launch(self, rows: int) -> bool:
        """Queue the recorded run of so many rows, if there is one that has today's addresses."""
        if self._recorded_with != self._generations:
            self._recorded.clear()
            self._recorded_with = self._generations
        return self._recorded.launch(rows)

    def _bind(
        self, plan: LoadedPlan, batch: Batch, arrays: Mapping[str, Array], at: Mapping[str, int]
    ) -> None:
        context = plan.context
        for name, array in arrays.items():
            _accepted(context.set_input_shape(name, array.shape), f"the shape of {name}")
            _accepted(context.set_tensor_address(name, at[name]), f"the address of {name}")
        name = plan.io.logits.name
        given = context.set_tensor_address(name, self._logits.address)
        _accepted(given, f"the address of {name}")
        place = (batch.first_slot, batch.rows)
        phase = plan.io.phase
        if self._bound.get(phase) != place:
            self._bound.pop(phase, None)
            self._bind_cache(plan, *place)
            self._bound[phase] = place

    def _bind_cache(self, plan: LoadedPlan, first_slot: int, rows: int) -> None:
        """The same addresses as past and as present: the cache is updated where it lies."""
        context = plan.context
        addresses = (*self._pool.keys(first_slot), *self._pool.values(first_slot))
        for (past, present), address in zip(cache_pairs(plan.io), addresses, strict=True):
            shape = (rows, past.shape[1], self._pool.capacity, past.shape[3])
            _accepted(context.set_input_shape(past.name, shape), f"the shape of {past.name}")
            for tensor in (past, present):
                given = context.set_tensor_address(tensor.name, address)
                _accepted(given, f"the address of {tensor.name}")

    def _execute(self, plan: LoadedPlan) -> None:
        queued = plan.context.execute_async_v3(self._device.stream)
        _accepted(queued, "the execution")


def _one_line(text: str) -> str:
    """Without its line breaks."""
    return " ".join(text.split())


def _accepted(result: Any, what: str) -> None:
    """TensorRT says no with False, and why in its log."""
    if not result:
        raise StepError(f"{what} was refused")


def _arrays(plan: LoadedPlan, batch: Batch) -> dict[str, Array]:
    given = token_inputs(batch)
    return {
        spec.name: np.ascontiguousarray(given[spec.role], NUMPY_DTYPES[spec.dtype])
        for spec in plan.io.tokens
    }


def _with_spare_rows(batch: Batch, rows: int) -> Batch:
    """The batch filled up to `rows` with rows of one token in an empty cache."""
    missing = rows - batch.rows
    if not missing:
        return batch

    def filled(array: Array, value: int) -> Array:
        pads = ((0, missing), *((0, 0) for _ in array.shape[1:]))
        return np.pad(array, pads, constant_values=value)

    return replace(
        batch,
        token_ids=filled(batch.token_ids, 0),
        past_lens=filled(batch.past_lens, 0),
        query_lens=filled(batch.query_lens, 1),
        context_lens=filled(batch.context_lens, 1),
        logits_indices=filled(batch.logits_indices, 0),
    )
