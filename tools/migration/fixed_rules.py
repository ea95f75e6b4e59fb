"""Old settings that need no computation: those with nothing to set here, and those without an
equivalent, each with its reason."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from trtllm_lite.tools.migration.old_config import Value
from trtllm_lite.tools.migration.row import Kind

PLUGINS = "there are no plugins: graphs hold standard operators, and TensorRT picks kernels"
ONE_GPU = "one process drives one GPU; serve --replicas runs several processes"
TEXT_ONLY = "text decoders only"
NO_LORA = "no adapters at run time: merge them into the checkpoint before the export"
NO_HEADS = "no draft models or heads; serve --speculation ngram needs none"
CHECKPOINT = "read from the checkpoint's own config.json"
REBUILD = "plans are a cache beside the graphs: built again, never changed in place"
ALWAYS = "always so"


@dataclass(frozen=True)
class FixedRule:
    """`pattern` of dotted names (as in a shell). `quiet`: values for which there is nothing to say,
    besides null and false."""

    pattern: str
    kind: Kind
    note: str
    new: str = ""
    quiet: tuple[Value, ...] = ()

    def fits(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


def _model(name: str, kind: Kind, note: str, *quiet: Value, new: str = "") -> FixedRule:
    return FixedRule(f"pretrained_config.{name}", kind, note, new, quiet)


def _build(name: str, kind: Kind, note: str, *quiet: Value, new: str = "") -> FixedRule:
    return FixedRule(f"build_config.{name}", kind, note, new, quiet)


def _plugin(name: str, kind: Kind, note: str, *quiet: Value, new: str = "") -> FixedRule:
    return _build(f"plugin_config.{name}", kind, note, *quiet, new=new)


MODEL_RULES = (
    _model("logits_dtype", "automatic", "logits are float32", "float32"),
    _model("mapping.gpus_per_node", "automatic", ONE_GPU, 8, 1),
    _model("mapping.auto_parallel", "no equivalent", ONE_GPU),
    _model("mapping.*", "no equivalent", ONE_GPU, 1, 0, -1),
    _model("use_parallel_embedding", "no equivalent", ONE_GPU),
    _model("embedding_sharding_dim", "no equivalent", ONE_GPU, 0),
    _model("quantization.smoothquant_val", "automatic", "only for SmoothQuant", 0.5),
    _model("quantization.clamp_val", "no equivalent", "no limits on activations"),
    _model("quantization.use_meta_recipe", "no equivalent", "no layers are left out by a recipe"),
    _model("quantization.has_zero_point", "automatic", "GPU formats are symmetric"),
    _model("quantization.pre_quant_scale", "no equivalent", "weights are quantized anew"),
    _model(
        "quantization.exclude_modules",
        "no equivalent",
        "no list of layers: the certificate decides which formats pass",
    ),
    _model("*lora*", "no equivalent", NO_LORA),
    _model("num_medusa*", "no equivalent", NO_HEADS),
    _model("*eagle*", "no equivalent", NO_HEADS),
    _model("redrafter*", "no equivalent", NO_HEADS),
    _model("max_draft_len", "no equivalent", NO_HEADS),
    _model("vision*", "no equivalent", TEXT_ONLY),
    _model("max_medusa_token_len", "no equivalent", NO_HEADS),
    _model("*", "automatic", CHECKPOINT),
)

BUILD_RULES = (
    _build("opt_num_tokens", "automatic", "profiles are derived from the graphs' tables"),
    _build("opt_batch_size", "automatic", "profiles are derived from the graphs' tables"),
    _build("force_num_profiles", "automatic", "profiles are derived from the graphs' tables"),
    _build("strongly_typed", "automatic", ALWAYS, True),
    _build("builder_opt", "no equivalent", "TensorRT's own default"),
    _build("profiling_verbosity", "no equivalent", "no option for it", "layer_names_only"),
    _build("enable_debug_output", "no equivalent", "no intermediate outputs"),
    _build("visualize_network", "automatic", "a bundle holds the ONNX graphs; look with inspect"),
    _build("monitor_memory", "automatic", "build prints what takes memory, before and after"),
    _build("dry_run", "mapped", "traces and reports, writes nothing", new="export --dry-run"),
    _build("use_refit", "no equivalent", REBUILD),
    _build("use_strip_plan", "no equivalent", REBUILD),
    _build("weight_sparsity", "no equivalent", "dense weights only"),
    _build("weight_streaming", "no equivalent", "weights stay on the GPU; quantize them instead"),
    _build("max_prompt_embedding_table_size", "no equivalent", TEXT_ONLY, 0),
    _build("max_encoder_input_len", "automatic", "decoders have no encoder", 0, 1, 1024),
    _build("use_mrope", "no equivalent", TEXT_ONLY),
    _build("use_fused_mlp", "automatic", "gate and up are one product", True, "enable"),
    _build("lora_config.lora_dir", "no equivalent", NO_LORA),
    _build("lora_config.*", "automatic", "only with adapters", "hf", 64),
    _build("auto_parallel_config.world_size", "no equivalent", ONE_GPU, 1),
    _build("auto_parallel_config.*", "automatic", "only with several GPUs"),
    _build(
        "gather_context_logits",
        "mapped",
        "scores of prompt tokens are given to the requests that ask",
        0,
        new="requests: echo with logprobs",
    ),
    _build(
        "gather_generation_logits",
        "mapped",
        "scores are given to the requests that ask",
        0,
        new="requests: logprobs",
    ),
)

PLUGIN_RULES = (
    _plugin("lora_plugin", "no equivalent", NO_LORA),
    _plugin("dora_plugin", "no equivalent", NO_LORA),
    _plugin("nccl_plugin", "no equivalent", ONE_GPU, "auto"),
    _plugin("use_fp8_context_fmha", "no equivalent", "attention is in float16 or bfloat16"),
    _plugin("streamingllm", "no equivalent", "only windows that the model itself has"),
    _plugin("paged_state", "no equivalent", "no state-space layers"),
    _plugin("reduce_fusion", "no equivalent", ONE_GPU),
    _plugin("user_buffer", "no equivalent", ONE_GPU),
    _plugin("pp_reduce_scatter", "no equivalent", ONE_GPU),
    _plugin(
        "use_paged_context_fmha", "automatic", "prompts in chunks and kept prefixes: " + ALWAYS
    ),
    _plugin("paged_kv_cache", "automatic", "one slot of --max-model-len tokens a sequence"),
    _plugin("tokens_per_block", "automatic", "kept prefixes are in blocks of 32 tokens", 64, 128),
    _plugin("remove_input_padding", "automatic", "at most a quarter of a run is padding", True),
    _plugin("context_fmha", "automatic", ALWAYS, True),
    _plugin("multiple_profiles", "automatic", "profiles are derived from the graphs' tables"),
    _plugin("dtype", "automatic", "--dtype is for everything"),
    _plugin("*", "automatic", PLUGINS, "auto"),
)

RULES = (*MODEL_RULES, *BUILD_RULES, *PLUGIN_RULES)


def fixed_rule(name: str) -> FixedRule | None:
    """The first rule for a dotted name."""
    return next((rule for rule in RULES if rule.fits(name)), None)
