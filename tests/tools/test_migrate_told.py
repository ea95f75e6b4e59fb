"""migrate: every setting of an old engine is told, whatever its version and its value."""

import json
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.migration.fixed_rules import fixed_rule
from trtllm_lite.tools.migration.old_config import OldConfig, read_old_config
from trtllm_lite.tools.migration.recipe import OFF, make_recipe
from trtllm_lite.tools.migration.row import Recipe

BY_DEFAULT = {
    *("build_config.speculative_decoding_mode", "build_config.max_beam_width"),
    "pretrained_config.quantization.group_size",
}
"""Those with a value of their own that says nothing: 1, and a size that no format uses."""


def engine(
    version: str, model: dict[str, Any], build: dict[str, Any], plugins: dict[str, Any]
) -> dict[str, Any]:
    """What trtllm-build writes."""
    lengths = {"max_batch_size": 64, "max_beam_width": 1, "max_num_tokens": 8192}
    return {
        "version": version,
        "pretrained_config": {**MODEL, **model},
        "build_config": {**lengths, **build, "plugin_config": plugins},
    }


def write(folder: Path, value: object) -> Path:
    (folder / "config.json").write_text(json.dumps(value))
    return folder


MODEL = {"architecture": "LlamaForCausalLM", "dtype": "bfloat16", "vocab_size": 32000}
OLD = engine(
    "0.9.0",
    {"head_size": 64, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}},
    {
        "max_input_len": 1024,
        "max_output_len": 512,
        "builder_opt": None,
        "profiling_verbosity": "layer_names_only",
        "auto_parallel_config": {"world_size": 1, "gpus_per_node": 8, "cluster_key": "L4"},
        "use_fused_mlp": True,
    },
    {"gpt_attention_plugin": "bfloat16", "use_custom_all_reduce": True, "enable_xqa": True},
)
NEW = engine(
    "1.0.0",
    {
        "kv_dtype": "bfloat16",
        "mapping": {
            "world_size": 2,
            "tp_size": 2,
            "cp_config": {},
            "moe_tp_size": 2,
            "attn_cp_size": -1,
            "enable_attention_dp": False,
        },
        "quantization": {
            "quant_algo": "W4A16_AWQ",
            "kv_cache_quant_algo": "FP8",
            "group_size": 128,
            "has_zero_point": False,
            "pre_quant_scale": True,
            "exclude_modules": ["lm_head"],
        },
        "runtime_defaults": None,
        "num_medusa_heads": 4,
    },
    {
        "input_timing_cache": "a.cache",
        "speculative_decoding_mode": 4,
        "max_draft_len": 63,
        "use_strip_plan": True,
        "lora_config": {"lora_dir": ["x"], "max_lora_rank": 8, "max_loras": 4},
        "monitor_memory": True,
    },
    {"lora_plugin": "auto", "dora_plugin": True, "manage_weights": True, "user_buffer": True},
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from(["auto", "", "float16", "disable"]),
    st.lists(st.integers(0, 9), max_size=1),
)


def all_leaves(value: object, name: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        inside = ((item, f"{name}.{key}" if name else key) for key, item in value.items())
        return [leaf for item, inner in inside for leaf in all_leaves(item, inner)]
    return [name]


def accounted(recipe: Recipe) -> list[str]:
    """Every name of a setting that is told, as often as it is."""
    return [
        *(name for row in recipe.rows for name in row.names or (row.old,)),
        *recipe.unset,
    ]


@pytest.mark.parametrize("old", [OLD, NEW], ids=["0.9", "1.0"])
def test_every_setting_is_told_once(tmp_path: Path, old: dict[str, Any]) -> None:
    recipe = make_recipe(read_old_config(write(tmp_path, old)))
    assert sorted(accounted(recipe)) == sorted(set(all_leaves(old)) - {"version"})


def recipe_or_refusal(config: OldConfig) -> tuple[Recipe | None, str]:
    try:
        return make_recipe(config), ""
    except UsageError as error:
        return None, str(error)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_is_set_is_told(data: st.DataObject) -> None:
    """Any known setting, and some that nobody knows, with values of any kind: refused by name, or
    told; and what is counted among the others is off or as by default."""
    needed = ("version", "pretrained_config.architecture")
    leaves = [name for name in all_leaves(NEW) if name not in needed]
    unknown = [f"{part}.no_such" for part in ("build_config", "pretrained_config.x")]
    drawn = data.draw(st.dictionaries(st.sampled_from([*leaves, *unknown]), VALUES, max_size=4))
    flat = {f"pretrained_config.{name}": MODEL[name] for name in ("architecture", "dtype")}
    nested: dict[str, Any] = {"version": "1.0.0", "build_config": {}}
    for name, value in {**flat, **drawn}.items():
        *folders, last = name.split(".")
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    with tempfile.TemporaryDirectory() as folder:
        config = read_old_config(write(Path(folder), nested))
    recipe, refused = recipe_or_refusal(config)
    if recipe is None:
        assert any(name in refused for name in drawn)
        return
    told = accounted(recipe)
    assert len(told) == len(set(told))
    assert set(config.settings) <= set(told)
    for name in recipe.unset:
        value, rule = config.settings[name], fixed_rule(name)
        quiet = value in OFF or (rule is not None and value in rule.quiet)
        assert quiet or name in BY_DEFAULT or value == config.settings["pretrained_config.dtype"]
