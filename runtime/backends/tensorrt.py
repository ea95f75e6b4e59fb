"""The backend of the `tensorrt` target: runs the plans that were built from a bundle's graphs.

It has never run on a GPU. Everything but the GPU's own part is proved against `fake_tensorrt.py`,
which refuses what TensorRT refuses and computes with ONNX Runtime.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trtllm_lite.runtime.backends.base import SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.cuda_device import open_cuda
from trtllm_lite.runtime.backends.device import Device
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.phases import graphs_to_open, has_extend, takes_several_tokens
from trtllm_lite.runtime.backends.trt_plans import LoadedPlans, load_plans
from trtllm_lite.runtime.backends.trt_session import Tools, TrtSession
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.store import Machine, Need, StoredEngine, find_engine
from trtllm_lite.runtime.engines.trt_log import SharedLogger, shared_logger
from trtllm_lite.runtime.engines.trt_module import (
    INSTALL,
    NoTensorRTError,
    TensorRT,
    installed_tensorrt,
)
from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.manifest import Limits

TARGET = "tensorrt"
REMEDY = "lower max_num_seqs, or build plans for a lower --max-model-len"


@dataclass(frozen=True)
class Machinery:
    """Where TensorRT and the GPU come from."""

    installed: Callable[[], tuple[TensorRT, ...]] = installed_tensorrt
    open_device: Callable[[], Device] = open_cuda


@dataclass(frozen=True, eq=False)
class FoundPlans:
    """Plans that this machine can load. Whoever found them opens a session, which then owns the
    device, or closes them."""

    bundle: Bundle
    trt: TensorRT
    device: Device
    stored: StoredEngine

    def open(self, options: SessionOptions, *, recorded: bool = True) -> TrtSession:
        """Load the plans and reserve the KV pool. `recorded`: decode runs become CUDA graphs.

        Raises BundleError for a plan that was changed or does not keep the contract, UsageError for
        options that cannot be honoured and for memory that is not there; the device is closed then.
        """
        try:
            self._check(options)
            return self._open(options, shared_logger(self.trt.module), recorded)
        except BaseException:
            self.device.close()
            raise

    def close(self) -> None:
        self.device.close()

    @property
    def limits(self) -> Limits:
        """What an engine on these plans may have at most."""
        key = self.stored.record.key
        return Limits(key.max_num_seqs, key.max_model_len)

    def _check(self, options: SessionOptions) -> None:
        key = self.stored.record.key
        if options.num_slots > key.max_num_seqs:
            raise UsageError(
                f"max_num_seqs: got {options.num_slots}; the plans were built for at most "
                f"{key.max_num_seqs}"
            )
        if options.capacity > key.capacity:
            raise UsageError(
                f"max_model_len + max_num_batched_tokens: got {options.capacity}; the plans have "
                f"slots of {key.capacity} tokens; lower one of them, or build with more"
            )

    def _open(self, options: SessionOptions, logger: SharedLogger, recorded: bool) -> TrtSession:
        manifest, capacity = self.bundle.manifest, self.stored.record.key.capacity
        self.device.use()
        plans = self._load(options, logger)
        pool = DevicePool(self.device, manifest.kv, options.num_slots, capacity, REMEDY)
        info = SessionInfo(
            "tensorrt",
            self.device.name,
            1,
            manifest.kv.bytes_per_token,
            multi_token_decode=takes_several_tokens(manifest),
            kernels="tensorrt",
            kv_dtype=manifest.kv.dtype,
            kv_reserved=True,
        )
        tools = Tools(self.device, logger.listening, recorded)
        return TrtSession(tools, plans, pool, options, info)

    def _load(self, options: SessionOptions, logger: SharedLogger) -> LoadedPlans:
        manifest = self.bundle.manifest
        with logger.listening() as heard:
            try:
                return load_plans(
                    self.trt.module,
                    logger.for_tensorrt,
                    self.device,
                    self.bundle,
                    self.stored,
                    graphs_to_open(manifest, options.phases),
                )
            except BundleError as error:
                if not heard.errors:
                    raise
                said = " ".join(heard.errors[0].split())
                raise BundleError(self.stored.folder, f"{error} ({said})") from error


def find_plans(bundle: Bundle, need: Need, machinery: Machinery | None = None) -> FoundPlans:
    """The plans of a bundle that this machine can load, of the first TensorRT that has some.

    Raises BundleError where there are none, NoTensorRTError or DeviceError where something is
    missing to run them: one line with what to do.
    """
    if bundle.manifest.target != TARGET:
        raise BundleError("target", f"{bundle.manifest.target!r}; TensorRT runs {TARGET!r}")
    if not has_extend(bundle.manifest):
        raise BundleError("graphs", "TensorRT needs one of phase extend; export the model again")
    machinery = machinery or Machinery()
    installed = machinery.installed()
    if not installed:
        raise NoTensorRTError(f"no TensorRT is installed; {INSTALL}")
    device = machinery.open_device()
    try:
        trt, stored = _first_that_fits(bundle, need, installed, device.gpu)
    except BaseException:
        device.close()
        raise
    return FoundPlans(bundle, trt, device, stored)


def _first_that_fits(
    bundle: Bundle, need: Need, installed: tuple[TensorRT, ...], gpu: str
) -> tuple[TensorRT, StoredEngine]:
    """Raises BundleError with what each of them lacks."""
    reasons = []
    for trt in installed:
        try:
            return trt, find_engine(bundle, Machine(trt.flavour, trt.version, gpu), need)
        except BundleError as error:
            reasons.append(error)
    raise reasons[0]
