"""Old architectures, and how their model families stand here."""

from trtllm_lite.tools.migration.row import Kind

FAMILIES = {
    "LlamaForCausalLM": ("llama", "mistral"),
    "MistralForCausalLM": ("mistral",),
    "QWenForCausalLM": ("qwen2", "qwen3"),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3",),
    "Qwen3MoeForCausalLM": ("qwen3_moe",),
    "Gemma2ForCausalLM": ("gemma2",),
    "Gemma3ForCausalLM": ("gemma3_text",),
    "Phi3ForCausalLM": ("phi3",),
    "GPTForCausalLM": ("gpt2", "starcoder2"),
    "GPTNeoXForCausalLM": ("gpt_neox",),
    "OPTForCausalLM": ("opt",),
    "CohereForCausalLM": ("cohere", "cohere2"),
    "GLM4ForCausalLM": ("glm4",),
    "MixtralForCausalLM": ("mixtral",),
    "FalconForCausalLM": ("falcon",),
    "BloomForCausalLM": ("bloom",),
    "MPTForCausalLM": ("mpt",),
    "MambaForCausalLM": ("mamba",),
    "DeepseekV3ForCausalLM": ("deepseek_v3",),
}
"""The `model_type`s whose checkpoints became engines of an architecture."""

OTHER_KINDS = {
    **dict.fromkeys(("EncoderModel", "DecoderModel", "WhisperEncoder"), "an encoder"),
    **dict.fromkeys(("BertModel", "BertForQuestionAnswering", "RobertaModel"), "an encoder"),
    **dict.fromkeys(("BertForSequenceClassification",), "an encoder"),
    **dict.fromkeys(
        ("MedusaForCausalLm", "EagleForCausalLM", "ReDrafterForLLaMALM"), "draft heads"
    ),
    **dict.fromkeys(("MLLaMAForCausalLM", "LlavaNextVisionWrapper"), "images"),
    **dict.fromkeys(("RecurrentGemmaForCausalLM",), "recurrent layers"),
}


def family_row(architecture: str) -> tuple[Kind, str, str]:
    """Kind, new name and note for an architecture."""
    from trtllm_lite.exporter.families import families

    if architecture in OTHER_KINDS:
        return "no equivalent", "", f"{OTHER_KINDS[architecture]}: decoders of text only"
    names = FAMILIES.get(architecture, ())
    known = [f for f in families() if f.model_type in names]
    refused = {f.model_type: f.note for f in known if f.status == "refused"}
    if refused:
        return "no equivalent", "", "; ".join(f"{k} is refused: {v}" for k, v in refused.items())
    if not known:
        return "automatic", "", "not among trtllm-lite families: tried, and the certificate decides"
    return "automatic", ", ".join(names), "proved: see trtllm-lite families"
