"""What a checkpoint's configuration asks for that we do not do. Asked before any work."""

from typing import Any

from trtllm_lite.exporter.families import REFUSED
from trtllm_lite.runtime.errors import UnsupportedError

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SUPPORTED = "decoder-only text models of causal attention and dense layers, in plain weights"


def refuse_unsupported(config: Any) -> None:
    """Raise UnsupportedError naming the first feature that is not supported."""
    for needs in _missing(config):
        raise UnsupportedError(needs, SUPPORTED, "see `trtllm-lite families`")


def _missing(config: Any) -> list[str]:
    found = [
        _refused_family(config),
        _quantized(config),
        _not_decoder(config),
        _experts(config),
        _layer_types(config),
        _dynamic_rope(config),
    ]
    return [text for text in found if text]


def _refused_family(config: Any) -> str | None:
    notes = [f.note for f in REFUSED if f.model_type == config.model_type]
    return f"{notes[0]} ({config.model_type})" if notes else None


def _quantized(config: Any) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    return f"weights quantized with {method}"


def _not_decoder(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return f"an encoder ({config.model_type} is an encoder-decoder model)"
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        return f"image or audio inputs ({config.model_type} is a multimodal model)"
    return None


def _experts(config: Any) -> str | None:
    for key in EXPERT_KEYS:
        count = getattr(config, key, None)
        if isinstance(count, int) and count > 1:
            return f"mixture-of-experts layers ({key} = {count})"
    return None


def _layer_types(config: Any) -> str | None:
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    return f"layers of type {', '.join(others)}" if others else None


def _dynamic_rope(config: Any) -> str | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, dict)]
    kinds = {p.get("rope_type") for p in (nested or [parameters])}
    if "dynamic" in kinds:
        return "dynamic NTK rope scaling (every new length changes all cached keys)"
    if nested and "longrope" in kinds:
        return "longrope in some layers only"
    return None
