"""The session over TensorRT plans: KV in one allocation on the device, bound in place.

A run queues one copy of its small inputs, the execution, and one copy of the logits that are
wanted, on one stream, and waits once. Every context has memory of the same block. TensorRT
silently ignores what would be written beyond a slot, so the bounds are checked here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from trtllm_lite.runtime.backends.base import Batch, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.batch_pieces import Piece
from trtllm_lite.runtime.backends.device import Device, DeviceError, DeviceLostError
from trtllm_lite.runtime.backends.device_buffers import float_view, put
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.device_session import F32, DeviceSession, is_leading
from trtllm_lite.runtime.backends.graph_io import token_arrays
from trtllm_lite.runtime.backends.ort_session import one_line
from trtllm_lite.runtime.backends.recorded_runs import RecordedRuns, bucket
from trtllm_lite.runtime.backends.trt_contexts import PlanContext
from trtllm_lite.runtime.backends.trt_pieces import RunLimits, filled_up, pieces
from trtllm_lite.runtime.backends.trt_plans import LoadedPlans
from trtllm_lite.runtime.engines.trt_log import Messages
from trtllm_lite.runtime.errors import RunInterruptedError, StepError
from trtllm_lite.runtime.manifest import Phase

Listening = Callable[[], AbstractContextManager[Messages]]


@dataclass(frozen=True, eq=False)
class Tools:
    """What a session works with. `listening`: hears what TensorRT logs, until it is left.
    `recorded`: decode runs become CUDA graphs."""

    device: Device
    listening: Listening
    recorded: bool = True


class TrtSession(DeviceSession):
    """A `Session` on TensorRT. It owns the plans too."""

    def __init__(
        self,
        tools: Tools,
        plans: LoadedPlans,
        pool: DevicePool,
        options: SessionOptions,
        info: SessionInfo,
    ) -> None:
        vocab_size = int(plans["decode"].io.logits.shape[2])
        super().__init__(tools.device, pool, options, info, vocab_size)
        self._plans = plans
        self._listening = tools.listening
        self._limits: Mapping[Phase, RunLimits] = {p: x.limits for p, x in plans.plans.items()}
        self._recorded = RecordedRuns(tools.device, wanted=tools.recorded)
        self._recorded_with = self._generations
        self._contexts = {p: self._usable(x.context, p) for p, x in plans.plans.items()}
        """Of the runs that are not recorded."""

    def _pieces(self, batch: Batch) -> Sequence[Piece]:
        return pieces(batch, self._limits)

    def _run_all(self, parts: Sequence[Piece], shape: tuple[int, ...]) -> F32:
        """TensorRT says why in its log."""
        with self._listening() as heard:
            try:
                return super()._run_all(parts, shape)
            except (RunInterruptedError, DeviceLostError):
                raise
            except Exception as error:
                why = (one_line(error), *(" ".join(x.split()) for x in heard.errors[:1]))
                raise StepError("; ".join(why)) from error

    def _drop(self) -> None:
        """Contexts go before the memory that they were given."""
        with suppress(DeviceError):
            self._recorded.clear()
        self._contexts.clear()
        del self._plans

    def _run(self, batch: Batch) -> F32:
        plan, rows, wanted = self._plans[batch.phase], *batch.logits_indices.shape
        batch = filled_up(batch, plan.limits, self._pool.capacity)
        most = min(self._options.num_slots, plan.limits.rows.most)
        if is_leading(batch):
            batch = self._with_free_rows(batch, most)
        arrays = token_arrays(plan.io.tokens, batch)
        count = batch.logits_indices.shape[1]
        host = self._logits.grow(batch.rows * count * self._vocab_size * 4)
        addresses = put(self._inputs, arrays)

        def queue(context: PlanContext) -> None:
            place = (batch.first_slot, batch.rows)
            context.bind(place, arrays, addresses, self._logits.address)
            context.queue()

        if is_leading(batch) and bucket(batch.rows, most) == batch.rows:
            context = self._queue_recorded(batch.rows, queue)
        else:
            context = None
            queue(self._contexts[batch.phase])
        self._logits.download(rows * count * self._vocab_size * 4)
        self._device.synchronize()
        if context is not None:
            self._recorded.record(batch.rows, context)
        return float_view(host, (rows, count, self._vocab_size))[:, :wanted]

    def _queue_recorded(
        self, rows: int, queue: Callable[[PlanContext], None]
    ) -> PlanContext | None:
        """Queue a decode run that comes again and again. Where it was not recorded yet, it is
        queued on a context of its own, which is returned to be recorded."""
        if self._launch(rows):
            return None
        if self._recorded.works:
            try:
                made = self._plans.context_to_record("decode")
                if made is None:
                    raise StepError("TensorRT makes no more contexts")
                alone = self._plans.captures_itself
                queue(context := self._usable(made, "decode", captures_itself=alone))
            except StepError as error:
                self._recorded.give_up(error)
            else:
                return context
        queue(self._contexts["decode"])
        return None

    def _usable(self, context: Any, phase: Phase, *, captures_itself: bool = False) -> PlanContext:
        io, stream = self._plans[phase].io, self._device.stream
        return PlanContext(context, io, self._pool, stream, captures_itself=captures_itself)

    @property
    def _generations(self) -> tuple[int, int]:
        return self._inputs.generation, self._logits.generation

    def _launch(self, rows: int) -> bool:
        """Queue the recorded run of so many rows, if there is one that has today's addresses."""
        if self._recorded_with != self._generations:
            self._recorded.clear()
            self._recorded_with = self._generations
        return self._recorded.launch(rows)
