"""Every feature that is not supported is refused by its name, from the configuration alone."""

from typing import Any

import pytest
from transformers import AutoConfig

from trtllm_lite.exporter.capabilities import refuse_unsupported
from trtllm_lite.exporter.families import BASE, PROVED, REFUSED, Family, tiny_config
from trtllm_lite.runtime.errors import UnsupportedError


class Config:
    """Configuration values, as transformers' object gives them."""

    model_type = "unheard_of"

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@pytest.mark.parametrize("family", PROVED, ids=lambda f: f.key)
def test_proved_families_pass(family: Family) -> None:
    refuse_unsupported(tiny_config(family))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"quantization_config": None, "vision_config": None, "is_encoder_decoder": False},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": None, "rope_parameters": None},
        {"num_experts": 1, "num_local_experts": None, "n_routed_experts": 0},
        {"rope_parameters": {"rope_type": "longrope"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "llama3"}}},
    ],
)
def test_plain_values_pass(values: dict[str, Any]) -> None:
    refuse_unsupported(Config(**values))


LONGROPE_IN_SOME = {
    "full_attention": {"rope_type": "longrope"},
    "sliding_attention": {"rope_type": "default"},
}
DYNAMIC_IN_SOME = {
    "full_attention": {"rope_type": "dynamic"},
    "sliding_attention": {"rope_type": "default"},
}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantized with gptq"),
        ({"quantization_config": {"bits": 4}}, "weights quantized with"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"vision_config": {"depth": 2}}, "image or audio inputs"),
        ({"audio_config": {"depth": 2}}, "image or audio inputs"),
        ({"num_local_experts": 8}, r"mixture-of-experts layers \(num_local_experts = 8\)"),
        ({"num_experts": 64}, r"mixture-of-experts layers \(num_experts = 64\)"),
        ({"n_routed_experts": 256}, r"mixture-of-experts layers \(n_routed_experts = 256\)"),
        ({"moe_num_experts": 4}, r"mixture-of-experts layers \(moe_num_experts = 4\)"),
        (
            {"layer_types": ["full_attention", "linear_attention", "conv", "conv"]},
            "layers of type conv, linear_attention",
        ),
        ({"layer_types": ["chunked_attention"]}, "layers of type chunked_attention"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic NTK rope scaling"),
        ({"rope_parameters": DYNAMIC_IN_SOME}, "dynamic NTK rope scaling"),
        ({"rope_parameters": LONGROPE_IN_SOME}, "longrope in some layers only"),
    ],
)
def test_each_refusal_names_the_feature(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the checkpoint needs {named}") as caught:
        refuse_unsupported(Config(**values))
    said = str(caught.value)
    assert "supported: decoder-only text models" in said
    assert said.endswith("see `trtllm-lite families`")
    assert "\n" not in said


@pytest.mark.parametrize("family", REFUSED, ids=lambda f: f.key)
def test_refused_families_are_named(family: Family) -> None:
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(Config(model_type=family.model_type))
    assert f"{family.note} ({family.model_type})" in str(caught.value)


def test_a_real_configuration_of_an_expert_model() -> None:
    """Not a refused row, so its configuration alone has to tell."""
    with pytest.raises(UnsupportedError, match="mixture-of-experts"):
        refuse_unsupported(AutoConfig.for_model("qwen2_moe"))


def test_a_real_configuration_with_dynamic_rope() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedError, match="dynamic NTK"):
        refuse_unsupported(AutoConfig.for_model("llama", **{**BASE, "rope_parameters": rope}))
