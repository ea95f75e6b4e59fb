"""What an export is asked to do. Frozen, checked once."""

from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.errors import UsageError

TARGETS = ("cpu", "cuda", "tensorrt")
DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTION = ("lengths", "mask")
QUANTIZE = ("none", "int8", "int4", "fp8", "auto")
PREFILL_FORMATS = ("w8a8", "same")
KV_DTYPES = ("auto", "float32", "float16", "int8")
MAX_SEQS = 4096
DEFAULT_DTYPES = {"cpu": "float32", "cuda": "float16", "tensorrt": "float16"}


@dataclass(frozen=True)
class ExportOptions:
    """Options of one export.

    model: a Hugging Face folder, a hub id, or a GGUF file. output: the bundle folder to make.
    target: what the graphs are lowered for: ONNX Runtime on the CPU or on CUDA, or TensorRT.
    dtype: how weights are stored; the cpu target computes in float32 whatever the storage, because
    ONNX Runtime has no bfloat16 and hardly any float16 CPU kernels. The others compute in it, and
    have a KV cache of it. "auto", which is replaced at once, is float32 for the cpu target and
    float16 for the others.
    max_model_len: longest sequence, None is what the checkpoint declares. max_num_seqs: slots that
    the runtime opens by default. revision: of a hub id. num_layers: keep only the first layers
    (used to verify a model whose reference does not fit in memory).

    quantize: "int8" or "int4" weights, "fp8" for TensorRT, or "auto" for int8 if its certificate
    passes, else none. What is left then (norms, biases) is float32 for the cpu target, so `dtype`
    has to be, and of `dtype` for the others. prefill_format: "w8a8" also rounds activations, by the
    token, which makes prompts about twice as fast and needs a second copy of the weights; "same" is
    the decode format and one copy. None is w8a8 for int8, same for int4 and for the cuda target,
    which has nothing else.

    kv_dtype: of the KV cache under our own kernels, which run quantized weights; graphs over ONNX
    Runtime's operators always have a float32 one. "auto" is float16 where the kernels have the
    model's attention and the certificate passes, else float32.

    scout: where the arithmetic is float16, compute a few texts in float32 on this machine, and keep
    in float32 what goes beyond float16.

    attention: how the graphs for TensorRT say which keys of a cache a query sees. TensorRT's parser
    drops "lengths", which `trtllm-lite build` puts back; "mask" costs memory and time for a mask of
    the whole cache, and is right as it is parsed, by ONNX Runtime's TensorRT providers too.
    """

    model: str
    output: Path
    target: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    verify: bool = True
    dry_run: bool = False
    revision: str | None = None
    overwrite: bool = False
    num_layers: int | None = None
    quantize: str = "none"
    prefill_format: str | None = None
    kv_dtype: str = "float32"
    scout: bool = True
    attention: str = "lengths"

    def __post_init__(self) -> None:
        _one_of("--target", self.target, TARGETS)
        _one_of("--dtype", self.dtype, DTYPES)
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", DEFAULT_DTYPES[self.target])
        _one_of("--quantize", self.quantize, QUANTIZE)
        _one_of("--kv-dtype", self.kv_dtype, KV_DTYPES)
        _one_of("--attention", self.attention, ATTENTION)
        if self.attention != "lengths" and self.target != "tensorrt":
            raise UsageError(
                f"--attention {self.attention}: got --target {self.target}; only the graphs for "
                "tensorrt have another form; leave it out"
            )
        self._check_quantize()
        if self.target == "cuda":
            self._check_cuda()
            if self.quantize != "none":
                object.__setattr__(self, "prefill_format", "same")
        if self.target != "cpu":
            self._check_gpu()
        if self.max_model_len is not None and self.max_model_len < 1:
            raise UsageError(f"--max-model-len: got {self.max_model_len}; allowed: 1 or more")
        if not 1 <= self.max_num_seqs <= MAX_SEQS:
            raise UsageError(f"--max-num-seqs: got {self.max_num_seqs}; allowed: 1 to {MAX_SEQS}")

    def _check_quantize(self) -> None:
        if self.quantize == "fp8" and self.target != "tensorrt":
            raise UsageError(
                f"--quantize fp8: got --target {self.target}; only TensorRT has such weights; say "
                "int8 or int4, or --target tensorrt"
            )
        if self.prefill_format is not None:
            _one_of("--prefill-format", self.prefill_format, PREFILL_FORMATS)
            if self.quantize == "none":
                raise UsageError("--prefill-format: it needs --quantize int8, int4 or auto")
        if self.target == "cpu" and self.quantize != "none" and self.dtype != "float32":
            raise UsageError(
                f"--dtype {self.dtype}: with --quantize {self.quantize}, what is not quantized is "
                "float32; leave out --dtype"
            )
        if self.kv_dtype in ("float16", "int8") and self.quantize not in ("int8", "int4"):
            raise UsageError(
                f"--kv-dtype {self.kv_dtype}: only the native kernels have such a cache, and they "
                "run quantized weights; add --quantize int8 or int4, or say auto or float32"
            )
        if self.quantize == "auto" and not (self.verify and not self.dry_run):
            raise UsageError(
                "--quantize auto: it decides by the certificate; leave out --no-verify and "
                "--dry-run, or say int8 or none"
            )

    def _check_cuda(self) -> None:
        if self.dtype == "float32":
            raise UsageError(
                "--dtype float32: ONNX Runtime's attention has no float32 kernel on CUDA; allowed "
                "with --target cuda: float16, bfloat16"
            )
        if self.prefill_format == "w8a8":
            raise UsageError("--prefill-format w8a8: it has no kernel on CUDA; leave it out")

    def _check_gpu(self) -> None:
        if self.kv_dtype in ("float16", "int8"):
            raise UsageError(
                f"--kv-dtype {self.kv_dtype}: with --target {self.target} the cache has the type "
                "of --dtype; leave it out"
            )
        if self.target == "tensorrt" and self.prefill_format is not None:
            raise UsageError(
                f"--prefill-format {self.prefill_format}: all graphs for TensorRT have the same "
                "formats; leave it out"
            )


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option}: got {value!r}; allowed: {', '.join(allowed)}")
