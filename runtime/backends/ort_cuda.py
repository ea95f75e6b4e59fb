"""ONNX Runtime on an NVIDIA GPU: the backend of the `cuda` target.

It has never run on a GPU. Proved without one: where every node lands (`exporter/cuda_placement`),
that the same graph computes what its reference computes on the CPU provider, through this session
with its addresses bound alike, and which calls are made in which order.
"""

from typing import Any

from trtllm_lite.runtime.backends.base import SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.cuda_device import open_cuda
from trtllm_lite.runtime.backends.cuda_libraries import preload_cuda_libraries
from trtllm_lite.runtime.backends.device import Device, DeviceError
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.graph_io import check_actual, graph_io
from trtllm_lite.runtime.backends.host_device import HostDevice
from trtllm_lite.runtime.backends.onnxruntime import import_onnxruntime
from trtllm_lite.runtime.backends.ort_cuda_session import LoadedStep, OrtCudaSession
from trtllm_lite.runtime.backends.ort_graphs import actual_tensors
from trtllm_lite.runtime.backends.ort_providers import CPU, CUDA
from trtllm_lite.runtime.backends.ort_session import one_line
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import BundleError, MissingExtraError, UsageError
from trtllm_lite.runtime.manifest import Phase

TARGET, EXTRA = "cuda", "gpu"
OLDEST = (1, 31)
CLASH = (
    "onnxruntime-gpu (where onnxruntime for the CPU is, first pip uninstall -y onnxruntime "
    "onnxruntime-gpu: they share one folder)"
)
SLOT_STEP = 128
"""A slot holds a multiple of so many tokens, so that every slot begins where a tensor may."""
PHASES: tuple[Phase, ...] = ("prefill", "decode")


def open_session(bundle: Bundle, options: SessionOptions) -> OrtCudaSession:
    """Load the graph onto the first GPU and reserve the KV pool there.

    Raises MissingExtraError without onnxruntime-gpu or cuda-bindings, UsageError without a GPU, for
    options that cannot be honoured and for memory that is not there, BundleError for a graph that
    cannot be loaded or does not match its table.
    """
    _check(bundle, options)
    return open_on(import_gpu(), open_gpu(TARGET), bundle, options)


def open_on_host(bundle: Bundle, options: SessionOptions) -> OrtCudaSession:
    """The same session over the CPU provider and memory of the host: slow, for proofs. Raises as
    `open_session` does."""
    _check(bundle, options)
    return open_on(import_onnxruntime(OLDEST, EXTRA), HostDevice(), bundle, options, proof=True)


def open_on(
    ort: Any, device: Device, bundle: Bundle, options: SessionOptions, *, proof: bool = False
) -> OrtCudaSession:
    """`ort`: the module, or a stand-in. `proof`: over the CPU provider. The session owns the
    device, which is closed when there is none."""
    try:
        device.use()
        step = _load(ort, device, bundle, options, proof=proof)
        manifest = bundle.manifest
        capacity = -(-options.capacity // SLOT_STEP) * SLOT_STEP
        pool = DevicePool(device, manifest.kv, options.num_slots, capacity)
        info = SessionInfo(
            "onnxruntime",
            device.name,
            options.intra_op_num_threads or 1,
            manifest.kv.bytes_per_token,
            kv_dtype=manifest.kv.dtype,
            kv_reserved=True,
            top_logits=int(step.io.top[0].shape[2]),
        )
        return OrtCudaSession(ort, step, device, pool, options, info)
    except BaseException:
        device.close()
        raise


def version() -> str:
    """Which version of ONNX Runtime would run a bundle. Raises MissingExtraError."""
    return str(import_gpu().__version__)


def open_gpu(target: str) -> Device:
    """The first GPU, for a bundle of that target. Raises UsageError."""
    try:
        return open_cuda()
    except DeviceError as error:
        raise UsageError(
            f"target: the bundle is for {target!r}, and no GPU can be used here: {error}; run it "
            "on a machine with an NVIDIA GPU, or export with --target cpu"
        ) from error


def import_gpu() -> Any:
    """onnxruntime-gpu, with the libraries of CUDA that pip has installed. Raises
    MissingExtraError."""
    ort = import_onnxruntime(OLDEST, EXTRA)
    if CUDA not in ort.get_available_providers():
        # Both packages have the same module, and the one for the CPU hides the other.
        raise MissingExtraError(CLASH, EXTRA)
    preload_cuda_libraries(ort)
    return ort


def _check(bundle: Bundle, options: SessionOptions) -> None:
    manifest = bundle.manifest
    if manifest.target != TARGET:
        raise BundleError("target", f"{manifest.target!r}; this backend runs {TARGET!r}")
    if "decode" not in options.phases:
        raise UsageError(f"phases: got {options.phases}; 'decode' is always needed")
    if options.kernels == "native":
        raise UsageError("kernels: got 'native'; they run on the CPU; leave it out")
    if options.rounding != "fast":
        raise UsageError(f"rounding: got {options.rounding!r}; only kernels of the CPU have it")
    if options.kv_dtype not in ("auto", manifest.kv.dtype):
        raise UsageError(
            f"kv_dtype: got {options.kv_dtype!r}; the bundle has {manifest.kv.dtype}; export it "
            "with another --dtype"
        )
    for name in ("num_slots", "capacity"):
        value = getattr(options, name)
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}: got {value!r}; allowed: integers from 1")


def _load(
    ort: Any, device: Device, bundle: Bundle, options: SessionOptions, *, proof: bool
) -> LoadedStep:
    manifest = bundle.manifest
    _check_one_graph(bundle)
    io, spec = graph_io(manifest, "decode"), manifest.graph("decode")
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    # Weights do not grow, so they are not in the arena, which would take twice as much for them.
    settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if options.intra_op_num_threads is not None:
        settings.intra_op_num_threads = options.intra_op_num_threads
    providers = [CPU] if proof else [(CUDA, provider_options(device.stream)), CPU]
    path = str(bundle.graph_path("decode"))
    try:
        # Without fallback: ONNX Runtime would say so on stdout, and go on without the provider.
        session = ort.InferenceSession(path, settings, providers=providers, enable_fallback=0)
    except Exception as error:
        raise BundleError(f"{io.field}.file", f"cannot be loaded: {one_line(error)}") from error
    if not proof and CUDA not in session.get_providers():
        raise UsageError(
            "target: ONNX Runtime could not load its CUDA provider, CUDA's libraries are missing; "
            f"pip install 'trtllm-lite[{EXTRA}]', or look for them with `trtllm-lite doctor`"
        )
    check_actual(f"{io.field}.inputs", spec.inputs, actual_tensors(session.get_inputs()))
    check_actual(f"{io.field}.outputs", spec.outputs, actual_tensors(session.get_outputs()))
    # Neither the tables of angles nor a slot hold more.
    longest = min(manifest.limits.max_model_len, options.capacity)
    return LoadedStep(session, io, longest, "cpu" if proof else "cuda", captures=not proof)


def provider_options(stream: int) -> dict[str, str]:
    """Of the CUDA provider: our stream, so that copies and kernels keep their order without a wait;
    decode runs as CUDA graphs; sums of norms in float32, and float32 products with all of its bits.

    The arena of what runs work in doubles as it grows. One that takes what is asked for keeps a
    piece for every run that is longer than all before: several times as much.
    """
    return {
        "device_id": "0",
        "user_compute_stream": str(stream),
        "enable_cuda_graph": "1",
        "enable_skip_layer_norm_strict_mode": "1",
        "use_tf32": "0",
        "arena_extend_strategy": "kNextPowerOfTwo",
    }


def _check_one_graph(bundle: Bundle) -> None:
    """Raises BundleError unless both phases are the same file twice: one session serves them."""
    hashes = {entry.path: entry.sha256 for entry in bundle.manifest.files}
    files = [bundle.manifest.graph(phase).file for phase in PHASES]
    if hashes[files[0]] != hashes[files[1]]:
        raise BundleError("graphs", f"{' and '.join(files)} differ; for 'cuda' they are the same")
