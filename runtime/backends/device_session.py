"""What every session over a `Device` does alike: its slots and buffers, how a batch is run in
pieces, how it fails, and how it ends.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.base import Batch, KVBlock, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.batch_pieces import Piece, with_spare_rows
from trtllm_lite.runtime.backends.contract import check_batch
from trtllm_lite.runtime.backends.cuda_errors import says_lost
from trtllm_lite.runtime.backends.device import Device, DeviceError, DeviceLostError
from trtllm_lite.runtime.backends.device_buffers import Staging
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.ort_session import one_line
from trtllm_lite.runtime.backends.recorded_runs import rows_to_run
from trtllm_lite.runtime.errors import EngineDeadError, RunInterruptedError, StepError

FIRST_INPUT_BYTES = 64 * 1024

F32 = npt.NDArray[np.float32]


class DeviceSession(ABC):
    """A `Session` whose KV pool lies on a device, which it owns.

    Who derives from it says in which runs a batch is computed (`_pieces`), computes one (`_run`),
    and lets go of what it has loaded (`_drop`).
    """

    def __init__(
        self,
        device: Device,
        pool: DevicePool,
        options: SessionOptions,
        info: SessionInfo,
        vocab_size: int,
    ) -> None:
        self._device = device
        self._pool = pool
        self._options = options
        self._info = info
        self._vocab_size = vocab_size
        self._inputs, self._logits = Staging(device), Staging(device)
        self._inputs.grow(FIRST_INPUT_BYTES)
        self._logits.grow(options.num_slots * vocab_size * 4)
        self._occupied: set[int] = set()
        """Slots that may hold what is still needed."""
        self._going: Event | None = None
        """Set when the prefill run that is going on is to be given up."""
        self._closed = False
        self._lost: str | None = None
        """Why nothing on the device can be used any more."""

    @abstractmethod
    def _pieces(self, batch: Batch) -> Sequence[Piece]:
        """The runs that make the batch, in order. Raises StepError."""

    @abstractmethod
    def _run(self, batch: Batch) -> F32:
        """The logits of one run, a view of a buffer that the next one overwrites."""

    @abstractmethod
    def _drop(self) -> None:
        """Let go of what is bound to the device's memory."""

    @property
    def info(self) -> SessionInfo:
        return self._info

    @property
    def pool(self) -> DevicePool:
        """The memory that the graphs are bound to."""
        return self._pool

    def run(self, batch: Batch) -> F32:
        """Logits [rows, num_logits, vocab], a view of a buffer that the next `run` overwrites.
        Raises StepError for a batch outside the contract and for whatever the device or the library
        on it raises, RunInterruptedError after `interrupt`, EngineDeadError when the device is lost
        to the process."""
        with self._opened():
            multi = self._info.multi_token_decode
            check_batch(batch, self._options, self._vocab_size, multi_token_decode=multi)
            parts = self._pieces(batch)
            self._occupied.update(range(batch.first_slot, batch.first_slot + batch.rows))
            self._going = Event() if batch.phase == "prefill" else None
            try:
                return self._run_all(parts, batch.logits_indices.shape)
            except Exception as error:
                self._settle(error)
                if isinstance(error, RunInterruptedError):
                    raise
                what = f"{self._info.backend}, {batch.phase}"
                raise StepError(f"{what}: {one_line(error)}") from error
            finally:
                self._going = None

    def interrupt(self) -> None:
        # Every run has an event of its own: that of one that has ended does nothing any more.
        going = self._going
        if going is not None:
            going.set()

    def move(self, source: int, target: int, length: int) -> None:
        with self._opened():
            self._pool.move(source, target, length)
            self._occupied.add(target)

    def swap(self, a: int, b: int, length: int) -> None:
        with self._opened():
            self._pool.swap(a, b, length)
            self._occupied |= {a, b}

    def read(self, slot: int, spans: Sequence[tuple[int, int]]) -> list[KVBlock]:
        with self._opened():
            return self._pool.read(slot, spans)

    def write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        with self._opened():
            self._occupied.add(slot)
            self._pool.write(slot, start, blocks)

    def release(self, slot: int) -> None:
        with self._opened():
            self._occupied.discard(slot)

    def close(self) -> None:
        """What is bound to the device's memory goes before it. On a device that is lost nothing
        can be given back: it is left to the end of the process, since destructors that fail there,
        as those of ONNX Runtime's CUDA graphs do, would end the process at once."""
        if self._closed:
            return
        self._closed = True
        if self._lost is not None:
            _keep_for_ever(self)
            return
        with suppress(DeviceError):
            self._device.use()
        self._drop()
        self._device.close()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """The device is that of the calling thread. Raises EngineDeadError after `close`, and when
        the device is lost or turns out to be."""
        if self._closed:
            raise EngineDeadError("the session is closed")
        if self._lost is not None:
            raise EngineDeadError(self._lost)
        try:
            self._device.use()
            yield
        except DeviceLostError as error:
            self._lost = (
                f"{self._device.name} is lost to this process, which has to be started again: "
                f"{one_line(error)}"
            )
            raise EngineDeadError(self._lost) from error

    def _settle(self, error: Exception) -> None:
        """After a run that has failed: let nothing stay queued that reads a buffer which the next
        run writes. Raises DeviceLostError where there can be no next run: the error says so, or
        the wait fails as well."""
        if isinstance(error, DeviceLostError):
            raise error
        if says_lost(str(error)):
            raise DeviceLostError(one_line(error)) from error
        try:
            self._device.synchronize()
        except DeviceError as broken:
            raise DeviceLostError(f"{one_line(error)}; {one_line(broken)}") from error

    def _run_all(self, parts: Sequence[Piece], shape: tuple[int, ...]) -> F32:
        """The logits of several runs are put together."""
        if len(parts) == 1 and parts[0].columns is None:
            return self._run(parts[0].batch)
        result = np.empty((*shape, self._vocab_size), np.float32)
        for part in parts:
            self._check_wanted()
            logits = self._run(part.batch)
            if part.columns is None:
                result[part.row : part.row + part.batch.rows] = logits
            else:
                result[part.row, list(part.columns)] = logits[0, list(part.picks)]
        return result

    def _check_wanted(self) -> None:
        """Raises RunInterruptedError when what is going on was interrupted."""
        if self._going is not None and self._going.is_set():
            raise RunInterruptedError("a prefill run was interrupted")

    def _with_free_rows(self, batch: Batch, most: int) -> Batch:
        """A decode run from slot 0 on with the next number of rows that is run often, at most
        `most`."""
        return with_spare_rows(batch, rows_to_run(batch.rows, most, self._occupied))


def _keep_for_ever(session: DeviceSession) -> None:
    """A reference that nobody gives back, not even the interpreter when it ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


def is_leading(batch: Batch) -> bool:
    """Whether it is a decode run from slot 0 on. Such runs come again and again."""
    return batch.phase == "decode" and batch.first_slot == 0
