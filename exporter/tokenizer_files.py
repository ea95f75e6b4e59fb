"""Tokenizer, chat template and generation defaults of a checkpoint, as the bundle keeps them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from trtllm_lite.exporter.checkpoint import Checkpoint
from trtllm_lite.exporter.gguf import metadata_text
from trtllm_lite.exporter.gguf_tokenizer import apply_rule
from trtllm_lite.runtime.errors import CheckpointError

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """Names of the files written, None for what the checkpoint lacks, and the special ids."""

    tokenizer: str | None
    chat_template: str | None
    generation_config: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


def write_tokenizer_files(checkpoint: Checkpoint, folder: Path) -> TokenizerFiles:
    """Write what the checkpoint has. A checkpoint without a tokenizer gives a bundle that takes
    token ids only. Raises CheckpointError for a tokenizer that has no fast form."""
    tokenizer = _load(checkpoint)
    defaults = checkpoint.json(GENERATION_CONFIG)
    name = template = None
    if tokenizer is not None:
        (folder / TOKENIZER).write_text(_serialized(checkpoint, tokenizer), encoding="utf-8")
        name, template = TOKENIZER, _write_template(tokenizer, folder)
    if defaults is not None:
        (folder / GENERATION_CONFIG).write_text(json.dumps(defaults, indent=2) + "\n")
    return TokenizerFiles(
        tokenizer=name,
        chat_template=template,
        generation_config=GENERATION_CONFIG if defaults is not None else None,
        bos_token_id=_special(checkpoint, tokenizer, "bos_token_id"),
        eos_token_ids=_eos(checkpoint, tokenizer, defaults),
        pad_token_id=_special(checkpoint, tokenizer, "pad_token_id"),
    )


def _load(checkpoint: Checkpoint) -> Any | None:
    if checkpoint.gguf_file is None and not any(
        (checkpoint.folder / name).is_file() for name in TOKENIZER_FILES
    ):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(**checkpoint.load_arguments)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"the tokenizer cannot be read: {first}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError("the tokenizer has no fast form (tokenizer.json); convert it first")
    return tokenizer


def _serialized(checkpoint: Checkpoint, tokenizer: Any) -> str:
    text: str = tokenizer.backend_tokenizer.to_str(pretty=True)
    if checkpoint.gguf_file is None:
        return text
    path = checkpoint.folder / checkpoint.gguf_file
    rule = [metadata_text(path, f"tokenizer.ggml.{key}") for key in ("model", "pre")]
    apply_rule(tokenizer.backend_tokenizer, *rule)
    text = tokenizer.backend_tokenizer.to_str(pretty=True)
    # transformers gives a GGUF tokenizer special tokens of its class, behind those of the file.
    document = json.loads(text)
    known = checkpoint.config.vocab_size
    document["added_tokens"] = [t for t in document["added_tokens"] if t["id"] < known]
    return json.dumps(document, indent=2, ensure_ascii=False)


def _write_template(tokenizer: Any, folder: Path) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return None
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return CHAT_TEMPLATE


def _special(checkpoint: Checkpoint, tokenizer: Any | None, attribute: str) -> int | None:
    """The tokenizer's word goes before the configuration's; an id that the model does not know is
    none."""
    value = getattr(tokenizer, attribute, None) if tokenizer is not None else None
    if value is None:
        value = getattr(checkpoint.config, attribute, None)
    known = isinstance(value, int) and 0 <= value < checkpoint.config.vocab_size
    return value if known else None


def _eos(
    checkpoint: Checkpoint, tokenizer: Any | None, defaults: dict[str, Any] | None
) -> tuple[int, ...]:
    """Every id that any part of the checkpoint calls its end; the tokenizer's own stands first,
    because chat templates know it as eos_token."""
    found: list[int] = []
    for value in (
        getattr(tokenizer, "eos_token_id", None) if tokenizer is not None else None,
        (defaults or {}).get("eos_token_id"),
        getattr(checkpoint.config, "eos_token_id", None),
    ):
        ids = value if isinstance(value, list | tuple) else [value]
        found += [i for i in ids if isinstance(i, int) and i not in found]
    # An id that the model cannot produce ends nothing.
    return tuple(i for i in found if 0 <= i < checkpoint.config.vocab_size)
