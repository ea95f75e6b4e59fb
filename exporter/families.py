"""Model families: which are proved by a test with a tiny random checkpoint, which are refused.

Any other `model_type` is tried by the generic path, and its certificate decides. No code here
changes how a family is exported; `tiny` only configures its proof.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["proved", "generic", "refused"]

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ORIGINAL = 32
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}


@dataclass(frozen=True)
class Family:
    """One row of `trtllm-lite families`. `tiny` are the configuration values, over BASE unless
    `bare`, of the checkpoint that proves it."""

    model_type: str
    name: str
    status: Status
    note: str
    tiny: dict[str, Any] = field(default_factory=dict)
    bare: bool = False

    @property
    def key(self) -> str:
        """A short unique name for files and test ids."""
        return self.name.lower().replace(" ", "_").replace("/", "_").replace(".", "_")


def _proved(model_type: str, name: str, note: str, **tiny: Any) -> Family:
    return Family(model_type, name, "proved", note, tiny)


def _bare(model_type: str, name: str, note: str, **tiny: Any) -> Family:
    return Family(model_type, name, "proved", note, tiny, bare=True)


def _refused(model_type: str, name: str, note: str) -> Family:
    return Family(model_type, name, "refused", note)


def _longrope(partial: float) -> dict[str, Any]:
    """Rope parameters with a switch at ORIGINAL tokens, for a head of 16."""
    count = int(16 * partial) // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.1 * i for i in range(count)],
        "long_factor": [2.0 + 0.5 * i for i in range(count)],
    }


PROVED = (
    _proved("llama", "Llama 3", "llama3 rope scaling", rope_parameters=LLAMA3_ROPE),
    _proved("llama", "SmolLM2", "tied embedding", tie_word_embeddings=True),
    _proved("mistral", "Mistral", "full attention", sliding_window=None),
    _proved("mistral", "Mistral 7B v0.1", "sliding window in every layer", sliding_window=8),
    _proved("qwen2", "Qwen2", "biases in the projections"),
    _proved("qwen2", "Qwen2.5 long", "yarn rope scaling", rope_parameters=YARN_ROPE),
    _proved("qwen3", "Qwen3", "norms on queries and keys", head_dim=32),
    _proved(
        "gemma2",
        "Gemma 2",
        "softcaps on scores and logits, every other layer sliding",
        head_dim=32,
        sliding_window=8,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    _proved(
        "gemma3_text",
        "Gemma 3",
        "five sliding layers to one full, two rope bases",
        head_dim=32,
        sliding_window=8,
        num_hidden_layers=6,
        query_pre_attn_scalar=24,
    ),
    _proved(
        "phi3",
        "Phi-3",
        "longrope",
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=_longrope(1.0),
    ),
    _proved(
        "phi3",
        "Phi-4-mini",
        "longrope on three quarters of the head, tied embedding",
        tie_word_embeddings=True,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=_longrope(0.75),
    ),
    _proved("smollm3", "SmolLM3", "every fourth layer without positions", num_hidden_layers=4),
    _proved("olmo2", "OLMo 2", "norms after attention and feed-forward"),
    _proved(
        "olmo3", "OLMo 3", "three sliding layers to one full", sliding_window=8, num_hidden_layers=4
    ),
    _proved(
        "granite",
        "Granite 3",
        "four multipliers",
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
    ),
    _proved("cohere", "Command-R", "parallel block, norms on queries and keys", use_qk_norm=True),
    _proved(
        "cohere2",
        "Command-R7B",
        "sliding layers with positions, full ones without",
        sliding_window=8,
        num_hidden_layers=4,
    ),
    _proved("glm4", "GLM-4", "interleaved rotary on half the head", head_dim=32),
    _proved("starcoder2", "Starcoder2", "sliding window, biases", sliding_window=8),
    _proved(
        "stablelm",
        "StableLM",
        "rotary on a quarter of the head",
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    _bare(
        "gpt2",
        "GPT-2",
        "learned positions",
        n_embd=64,
        n_head=4,
        n_layer=2,
        vocab_size=160,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _bare(
        "gpt_neox",
        "Pythia",
        "GPT-NeoX: parallel residual, partial rotary",
        hidden_size=128,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=96,
        vocab_size=160,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _bare(
        "opt",
        "OPT",
        "learned positions with an offset",
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=96,
        vocab_size=160,
        word_embed_proj_dim=64,
        max_position_embeddings=128,
    ),
)

REFUSED = (
    _refused("bloom", "BLOOM", "ALiBi: positions as a bias on the scores"),
    _refused("mpt", "MPT", "ALiBi: positions as a bias on the scores"),
    _refused("falcon", "Falcon", "its own attention code"),
    _refused("mixtral", "Mixtral", "mixture-of-experts layers"),
    _refused("qwen3_moe", "Qwen3 MoE", "mixture-of-experts layers"),
    _refused("gpt_oss", "gpt-oss", "mixture-of-experts layers"),
    _refused("deepseek_v3", "DeepSeek V3", "mixture-of-experts layers, latent attention"),
    _refused("llama4_text", "Llama 4", "mixture-of-experts layers, chunked attention"),
    _refused("mamba", "Mamba", "state-space layers"),
    _refused("lfm2", "LFM2", "convolution layers"),
    _refused("t5", "T5", "an encoder"),
)

GENERIC = Family(
    "(any other)",
    "Any other decoder",
    "generic",
    "tried when its attention is transformers' AttentionInterface; the certificate decides",
)


def families() -> tuple[Family, ...]:
    """Every row, proved ones first."""
    return (*PROVED, GENERIC, *REFUSED)


def tiny_config(family: Family) -> Any:
    """The transformers configuration of a family's proof."""
    from transformers import AutoConfig

    values = family.tiny if family.bare else {**BASE, **family.tiny}
    # transformers completes nested parameters in place.
    return AutoConfig.for_model(family.model_type, **copy.deepcopy(values))
