"""What a bundle was exported with, read back from it."""

from pathlib import Path

import onnx_ir as ir

from trtllm_lite.exporter.gates import is_quantized
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.quantize.formats import NONE, W8A8
from trtllm_lite.exporter.quantize.plan import SAME
from trtllm_lite.exporter.tensorrt_rules.attention import LENGTHS
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.manifest import Manifest, Quantization
from trtllm_lite.runtime.native_table import PLAIN_CACHE
from trtllm_lite.runtime.native_weights import cache_dtypes


def options_of(bundle: Bundle, reference: str, folder: Path) -> ExportOptions:
    """Options that make the bundle again, of the checkpoint at `reference`, in `folder`."""
    manifest = bundle.manifest
    return ExportOptions(
        model=reference,
        output=folder,
        target=manifest.target,
        dtype=manifest.dtype,
        max_model_len=manifest.limits.max_model_len,
        max_num_seqs=manifest.limits.max_num_seqs,
        quantize=_quantize_of(manifest.quantization),
        prefill_format=_prefill_format_of(manifest),
        kv_dtype=next(iter(cache_dtypes(bundle)), PLAIN_CACHE),
        # Where nothing was found, looking for it again would find nothing.
        scout=bool(manifest.float32_values),
        attention=_attention_of(bundle),
    )


def _attention_of(bundle: Bundle) -> str:
    """How the graphs say what a query sees: by lengths where an Attention has them. Where none
    could have, the option makes no difference."""
    if bundle.manifest.target != "tensorrt":
        return "lengths"
    nodes = ir.load(bundle.graph_path("decode")).graph
    attentions = (node.inputs for node in nodes if node.op_type == "Attention")
    told = any(len(given) > LENGTHS and given[LENGTHS] is not None for given in attentions)
    return "lengths" if told else "mask"


def _quantize_of(formats: Quantization) -> str:
    """The option that makes a bundle of these formats."""
    if not is_quantized(formats):
        return NONE
    return next((q for q in ("int4", "fp8") if formats.decode.startswith(q)), "int8")


def _prefill_format_of(manifest: Manifest) -> str | None:
    formats = manifest.quantization
    if not is_quantized(formats) or manifest.target == "tensorrt":
        return None
    return W8A8.name if formats.prefill == W8A8.name else SAME
