"""Old weight and KV formats, and what comes closest here."""

from dataclasses import dataclass

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.migration.row import Kind

NAME = "pretrained_config.quantization.quant_algo"
ANEW = "quantized anew from the float checkpoint, in blocks of 32 to 128"
NO_ACTIVATIONS = "activations stay in --dtype"
FP4 = "no 4-bit floating point; --quantize int4 has as many bits"


@dataclass(frozen=True)
class Closest:
    """`quantize` is empty where nothing is close."""

    quantize: str
    note: str


_INT8, _INT4 = Closest("int8", f"weights only; {ANEW}"), Closest("int4", f"weights only; {ANEW}")
_W8A8 = Closest("int8", f"weights only; {NO_ACTIVATIONS}; {ANEW}")
_W4A8 = Closest("int4", f"weights only; {NO_ACTIVATIONS}; {ANEW}")
_FP8 = Closest("fp8", f"weights only; {NO_ACTIVATIONS}; {ANEW}")
_FP4 = Closest("", FP4)

CLOSEST = {
    "W8A16": _INT8,
    "W8A16_GPTQ": _INT8,
    "W4A16": _INT4,
    "W4A16_AWQ": _INT4,
    "W4A16_GPTQ": _INT4,
    "W4A8_AWQ": _W4A8,
    "W4A8_QSERVE_PER_GROUP": _W4A8,
    "W4A8_QSERVE_PER_CHANNEL": _W4A8,
    "W8A8_SQ_PER_CHANNEL": _W8A8,
    "W8A8_SQ_PER_TENSOR_PLUGIN": _W8A8,
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": _W8A8,
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN": _W8A8,
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN": _W8A8,
    "INT8": _W8A8,
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "FP8_BLOCK_SCALES": _FP8,
    "MXFP8": _FP8,
    "NVFP4": _FP4,
    "NVFP4_AWQ": _FP4,
    "W4A8_NVFP4_FP8": _FP4,
    "W4A8_MXFP4_FP8": _FP4,
    "W4A8_MXFP4_MXFP8": _FP4,
    "W4A16_MXFP4": _FP4,
    "MIXED_PRECISION": Closest("", "no list of layers and formats; one --quantize for all"),
}
"""By the names of TensorRT-LLM's QuantAlgo (`tensorrt_llm/quantization/mode.py`)."""


def quantize_for(algo: str | None) -> Closest:
    """What stands for a weight format. Raises UsageError for one that nobody has."""
    if algo not in CLOSEST:
        raise UsageError(f"{NAME}: got {algo!r}; allowed: {', '.join(CLOSEST)} or null")
    return CLOSEST[algo]


def kv_row() -> tuple[Kind, str, str]:
    """Kind, option and note for a KV cache in another format than the rest."""
    return "no equivalent", "", "TensorRT keeps KV caches in floating point of 16 or 32 bits"
