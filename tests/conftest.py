"""Fixtures that several folders of tests share: tiny random checkpoints and bundles of them."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from trtllm_lite.exporter.families import BASE
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.runtime.progress import NoProgress

# A busy machine is not a failure.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

VOCAB = 320
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [
    "the river ran slowly past the old mill",
    "count the swallows under its roof",
    "naïve 水 🙂",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and their children inherit that; tests
    that interrupt would then wait for ever."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def save_random(config: Any, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of that configuration whose weights are large enough to tell tokens apart."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of VOCAB ids with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, as a Hugging Face folder."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    values = {**BASE, "vocab_size": VOCAB, "tie_word_embeddings": True}
    save_random(AutoConfig.for_model("llama", **values), folder)
    save_tokenizer(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": [2]})
    )
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `tiny_checkpoint`, verified. Read-only: tests that change it take a copy."""
    output = tmp_path_factory.mktemp("bundle") / "tiny-llama"
    export(ExportOptions(model=str(tiny_checkpoint), output=output, max_num_seqs=4), NoProgress())
    return output


@pytest.fixture(scope="session")
def random_checkpoint() -> Any:
    """`save_random`, for tests that make checkpoints of their own."""
    return save_random
