"""Execution contexts of a plan: how they are made, set up for a run, and run.

A CUDA graph goes on depending on the context that it was captured from: when a shape or an address
of the context changes, the graph must not be launched any more. So each recorded run has a context
of its own, over device memory that all of them share, and that context is left as it is.

TensorRT-RTX runs new shapes with kernels for any shape, and swaps better ones in when it has
compiled them: what others had captured before would go on with the old ones. It captures by itself
instead, when the time has come, where its contexts are told to.
Sources: NVIDIA TensorRT, "CUDA Graphs" (one execution context per captured graph); TensorRT-RTX,
"Working with RTX CUDA Graphs".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_lite.runtime.backends.base import Array
from trtllm_lite.runtime.backends.device import Device, Recorded
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.graph_io import GraphIO
from trtllm_lite.runtime.errors import StepError


@dataclass(frozen=True)
class WorkingMemory:
    """Device memory that contexts work in, one after the other."""

    address: int
    nbytes: int


def new_context(
    trt: Any,
    engine: Any,
    memory: WorkingMemory,
    stream: int,
    *,
    profile: int = 0,
    fixed: bool = False,
) -> Any:
    """A context of the engine. `fixed`: it will only ever run one set of shapes, and be recorded.
    None where TensorRT makes none."""
    user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    if fixed and captures_itself(trt):
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        context = engine.create_execution_context(config)
    else:
        context = engine.create_execution_context(user_managed)
    if context is None:
        return None
    # A profile may come with a copy to the device, so the memory has to be there before it.
    context.set_device_memory(memory.address, memory.nbytes)
    # Only the first context of an engine has a profile without being told.
    return context if context.set_optimization_profile_async(profile, stream) else None


def captures_itself(trt: Any) -> bool:
    """Whether contexts of fixed shapes turn their runs into CUDA graphs by themselves."""
    return hasattr(trt, "CudaGraphStrategy")


@dataclass(frozen=True, eq=False)
class _Again:
    """What is recorded where it is queued."""

    context: "PlanContext"

    def launch(self) -> None:
        self.context.queue()

    def close(self) -> None:
        """The recording goes with the context."""


class PlanContext:
    """One execution context, its cache bound to a pool. `captures_itself`: its run becomes a CUDA
    graph without us."""

    def __init__(
        self,
        context: Any,
        io: GraphIO,
        pool: DevicePool,
        stream: int,
        *,
        captures_itself: bool = False,
    ) -> None:
        self._context = context
        self._io = io
        self._pool = pool
        self._stream = stream
        self._captures_itself = captures_itself
        self._place: tuple[int, int] | None = None
        """First slot and rows that the cache tensors are set to."""

    def bind(
        self,
        place: tuple[int, int],
        arrays: Mapping[str, Array],
        at: Mapping[str, int],
        logits: int,
    ) -> None:
        """Shapes and addresses of a run. `place`: first slot and rows; `at`: where the small inputs
        lie; `logits`: where they go. Raises StepError for what TensorRT refuses."""
        for name, array in arrays.items():
            self._set_shape(name, array.shape)
            self._set_address(name, at[name])
        self._set_address(self._io.logits.name, logits)
        if self._place != place:
            self._place = None
            self._bind_cache(*place)
            self._place = place

    def queue(self) -> None:
        """Queue the run. Raises StepError."""
        _accepted(self._context.execute_async_v3(self._stream), "the execution")

    def record(self, device: Device) -> Recorded:
        """The run that was just queued. Raises StepError, DeviceError."""
        return _Again(self) if self._captures_itself else device.record(self.queue)

    def _bind_cache(self, first_slot: int, rows: int) -> None:
        """The same addresses as past and as present: the cache is updated where it lies."""
        addresses = (*self._pool.keys(first_slot), *self._pool.values(first_slot))
        for (past, present), address in zip(self._io.cache, addresses, strict=True):
            self._set_shape(past.name, (rows, past.shape[1], self._pool.capacity, past.shape[3]))
            for tensor in (past, present):
                self._set_address(tensor.name, address)

    def _set_shape(self, name: str, shape: tuple[Any, ...]) -> None:
        _accepted(self._context.set_input_shape(name, shape), f"the shape of {name}")

    def _set_address(self, name: str, address: int) -> None:
        _accepted(self._context.set_tensor_address(name, address), f"the address of {name}")


def _accepted(result: Any, what: str) -> None:
    """TensorRT says no with False, and why in its log."""
    if not result:
        raise StepError(f"{what} was refused")
