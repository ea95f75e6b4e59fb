"""Runs of ONNX Runtime whose inputs and outputs are bound by their addresses on a device.

The cache is bound as input and as output at once: it is updated where it lies, and ONNX Runtime
copies nothing by itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from trtllm_lite.runtime.backends.base import Array, Batch
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.graph_io import GraphIO
from trtllm_lite.runtime.backends.kv_pool import NUMPY_DTYPES
from trtllm_lite.runtime.backends.ort_session import BFLOAT16
from trtllm_lite.runtime.errors import RunInterruptedError

Place = tuple[Literal["cuda", "cpu"], int]
"""Kind and number of a device, as IO bindings name it."""


class BoundRuns:
    """Binds, and runs one thing at a time. `ort`: the module; `check_wanted` raises
    RunInterruptedError when the run that is about to begin is not wanted any more."""

    def __init__(
        self, ort: Any, pool: DevicePool, where: Place, check_wanted: Callable[[], None]
    ) -> None:
        self._ort = ort
        self._pool = pool
        self._where = where
        self._check_wanted = check_wanted
        self._going: Any = None
        """The ort.RunOptions of the prefill run that is going on."""

    def bind(
        self,
        binding: Any,
        io: GraphIO,
        batch: Batch,
        arrays: Mapping[str, Array],
        at: Mapping[str, int],
    ) -> None:
        """The small inputs, which lie `at` those addresses, and the cache of the batch's slots."""
        for name, array in arrays.items():
            binding.bind_input(name, *self._where, array.dtype.type, array.shape, at[name])
        addresses = (*self._pool.keys(batch.first_slot), *self._pool.values(batch.first_slot))
        for (past, present), address in zip(io.cache, addresses, strict=True):
            shape = (batch.rows, past.shape[1], self._pool.capacity, past.shape[3])
            binding.bind_input(past.name, *self._where, element_type(past.dtype), shape, address)
            binding.bind_output(
                present.name, *self._where, element_type(past.dtype), shape, address
            )

    def bind_output(
        self, binding: Any, name: str, dtype: str, shape: tuple[int, ...], address: int
    ) -> None:
        binding.bind_output(name, *self._where, NUMPY_DTYPES[dtype], shape, address)

    def bind_host(self, binding: Any, name: str, array: Array) -> None:
        """An input that is read in host memory, whenever the binding runs."""
        place = array.ctypes.data
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, place)

    def run(
        self, session: Any, binding: Any, batch: Batch, entries: Mapping[str, str] | None = None
    ) -> None:
        """`entries`: of the run's configuration. Raises RunInterruptedError after `interrupt`, and
        what ONNX Runtime raises."""
        options = self._ort.RunOptions()
        for name, value in (entries or {}).items():
            options.add_run_config_entry(name, value)
        self._going = options if batch.phase == "prefill" else None
        try:
            # Whoever interrupts says so before looking for the options of the run.
            self._check_wanted()
            session.run_with_iobinding(binding, options)
        except Exception:
            if options.terminate:
                raise RunInterruptedError("a prefill run was interrupted") from None
            raise
        finally:
            self._going = None

    def interrupt(self) -> None:
        """From any thread: end the prefill run that is going on."""
        options = self._going
        if options is not None:
            options.terminate = True


def element_type(dtype: str) -> Any:
    """As IO bindings take it: a numpy type, or the number that ONNX has for it."""
    return BFLOAT16 if dtype == "bfloat16" else NUMPY_DTYPES[dtype]


def logits_bytes(batch: Batch, vocab_size: int) -> int:
    """Of a run's logits, float32."""
    return batch.logits_indices.size * vocab_size * np.dtype(np.float32).itemsize
