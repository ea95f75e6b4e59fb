"""A dense model after gpt-oss: sinks, clamped SwiGLU, sliding layers, and two channels of the
residual stream that go beyond float16. The certificate fails without islands and passes with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from trtllm_lite.exporter import prompts, verify
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.exporter.trace import trace
from trtllm_lite.runtime.errors import VerificationError
from trtllm_lite.runtime.progress import NoProgress

VOCAB, HIDDEN = 320, 64
WIDE, LARGE = slice(2), 50_000.0


class OssLikeConfig(GptOssConfig):  # type: ignore[misc]  # transformers has no types
    model_type = "oss_like"


class DenseExpert(nn.Module):
    """One expert of gpt-oss, which all tokens go to."""

    def __init__(self, config: OssLikeConfig) -> None:
        super().__init__()
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj((up + 1) * gate * torch.sigmoid(gate * self.alpha)), None


class OssLikeForCausalLM(GptOssForCausalLM):  # type: ignore[misc]  # transformers has no types
    config_class = OssLikeConfig

    def __init__(self, config: OssLikeConfig) -> None:
        super().__init__(config)
        self.model.rotary_emb = LlamaRotaryEmbedding(config)
        for layer in self.model.layers:
            layer.mlp = DenseExpert(config)


def save_wide(folder: Path) -> Any:
    """The first layer puts 50,000 into two channels twice; norms behind it weigh the others
    more."""
    config = OssLikeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        num_local_experts=1,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    first, second = model.model.layers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for bias in (first.self_attn.o_proj.bias, first.mlp.down_proj.bias):
            bias[WIDE] = LARGE
        for norm in (second.input_layernorm, second.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(2 * LARGE * (2 / HIDDEN) ** 0.5)
            norm.weight[WIDE] = 0.5
    model.save_pretrained(folder)
    return model.eval()


Export = Callable[..., ExportReport]


@pytest.fixture(scope="module", autouse=True)
def whole_rotation() -> Iterator[None]:
    """By angles of the whole head, as everywhere else, not of half of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gpt_oss, "apply_rotary_pos_emb", apply_rotary_pos_emb)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    AutoConfig.register("oss_like", OssLikeConfig, exist_ok=True)
    AutoModelForCausalLM.register(OssLikeConfig, OssLikeForCausalLM, exist_ok=True)
    folder = tmp_path_factory.mktemp("oss-like") / "model"
    save_wide(folder)
    return folder


@pytest.fixture(scope="module")
def certified(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exports it for a target with a certificate; it is traced once."""
    folder, kept = tmp_path_factory.mktemp("oss-like"), list[ir.Model]()

    def trace_once(*args: Any) -> ir.Model:
        if not kept:
            kept.append(trace(*args))
        return kept[0].clone()

    def run(target: str, **more: Any) -> ExportReport:
        output = folder / f"{target}-{len(list(folder.iterdir()))}"
        options = ExportOptions(str(checkpoint), output, target, max_model_len=32, **more)
        return export(options, NoProgress())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtllm_lite.exporter.graphs.trace", trace_once)
        patch.setattr(verify, "NEW_TOKENS", 4)
        patch.setattr(prompts, "TEXTS", prompts.TEXTS[:6])
        yield run


def last_logits(checkpoint: Path, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=dtype
    ).eval()
    with torch.no_grad():
        return [model(torch.tensor([[t, 9, 30]])).logits[0, -1].float().numpy() for t in (5, 6)]


def test_transformers_float16_overflows(checkpoint: Path) -> None:
    exact = last_logits(checkpoint, torch.float32)
    assert np.isfinite(exact).all()
    assert np.abs(exact[0] - exact[1]).max() > 0.1 * np.abs(exact).max()
    assert not np.isfinite(last_logits(checkpoint, torch.float16)).any()


@pytest.mark.parametrize("target", ["tensorrt", "cuda"])
def test_islands_are_what_the_certificate_needs(certified: Export, target: str) -> None:
    if target == "tensorrt":
        failure = r"logits_max_abs is 1e\+300 .*first layer to depart is 0"
        with pytest.raises(VerificationError, match=failure):
            certified(target, scout=False)
    made = certified(target)
    assert len(made.manifest.float32_values) >= 4
    assert made.parity is not None
    assert made.parity["passed"]


def test_bfloat16_needs_none(certified: Export) -> None:
    made = certified("tensorrt", dtype="bfloat16")
    assert made.manifest.float32_values == ()
    assert made.parity is not None
    assert made.parity["passed"]
