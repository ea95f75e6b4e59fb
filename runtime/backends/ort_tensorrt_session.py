"""The session on a provider of ONNX Runtime that builds TensorRT engines: the graphs of the
`tensorrt` target in mask form, KV in one allocation on the device, bound in place.

An engine takes no more than its profile allows, so a batch is run in pieces, as over plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_lite.runtime.backends.base import Batch, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.batch_pieces import Piece
from trtllm_lite.runtime.backends.device import Device
from trtllm_lite.runtime.backends.device_buffers import float_view, put
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.device_session import F32, DeviceSession
from trtllm_lite.runtime.backends.graph_io import GraphIO, token_arrays
from trtllm_lite.runtime.backends.ort_bound import BoundRuns, logits_bytes
from trtllm_lite.runtime.backends.ort_engine_cache import EngineCache
from trtllm_lite.runtime.backends.trt_pieces import RunLimits, pieces
from trtllm_lite.runtime.manifest import Phase


@dataclass(frozen=True, eq=False)
class ProviderGraph:
    """A loaded graph, its table, what a run of it may hold, and where its engine is kept."""

    io: GraphIO
    session: Any
    limits: RunLimits
    cache: EngineCache


class OrtTensorrtSession(DeviceSession):
    """A `Session` on a GPU. It owns the inference sessions too, one for each graph."""

    def __init__(
        self,
        ort: Any,
        graphs: Mapping[Phase, ProviderGraph],
        device: Device,
        pool: DevicePool,
        options: SessionOptions,
        info: SessionInfo,
    ) -> None:
        super().__init__(device, pool, options, info, int(graphs["decode"].io.logits.shape[2]))
        self._graphs = dict(graphs)
        self._limits = {phase: graph.limits for phase, graph in graphs.items()}
        self._runs = BoundRuns(ort, pool, ("cuda", 0), self._check_wanted)

    def interrupt(self) -> None:
        super().interrupt()
        self._runs.interrupt()

    def _pieces(self, batch: Batch) -> Sequence[Piece]:
        return pieces(batch, self._limits)

    def _run(self, batch: Batch) -> F32:
        graph = self._graphs[batch.phase]
        arrays = token_arrays(graph.io.tokens, batch)
        nbytes = logits_bytes(batch, self._vocab_size)
        host = self._logits.grow(nbytes)
        at = put(self._inputs, arrays)
        binding = graph.session.io_binding()
        self._runs.bind(binding, graph.io, batch, arrays, at)
        shape = (*batch.logits_indices.shape, self._vocab_size)
        logits = graph.io.logits
        self._runs.bind_output(binding, logits.name, logits.dtype, shape, self._logits.address)
        self._runs.run(graph.session, binding, batch)
        self._logits.download(nbytes)
        self._device.synchronize()
        return float_view(host, shape)

    def _drop(self) -> None:
        """A provider may write what it keeps for the next time when its session ends."""
        caches = [graph.cache for graph in self._graphs.values()]
        self._graphs.clear()
        for cache in caches:
            cache.seal()
