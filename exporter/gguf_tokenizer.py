"""How a GGUF file's byte-level tokenizer cuts text into words before merging.

The file names the rule (`tokenizer.ggml.pre`); transformers does not read the name and uses GPT-2's
rule for all. The rules below are those of the models' own tokenizer.json; a name without one is
refused, because other words give other tokens, and nothing downstream would notice.
Source: llama.cpp, src/llama-vocab.cpp, the regular expression of each pre-tokenizer type. Checked
by hand against that project's vocabulary files: 47 of 47 texts give its ids, for every rule but
smollm, which has no such file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

from trtllm_lite.runtime.errors import UnsupportedError

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Rule:
    """`words` makes the pre-tokenizer; `whole_words`: a word that is a token is not merged from
    smaller ones (`ignore_merges` in tokenizer.json)."""

    words: Callable[[], Any]
    whole_words: bool = False


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2()])


def _llama3() -> Any:
    return _split(WORDS % "{1,3}")


def _qwen2() -> Any:
    return _split(WORDS % "")


RULES = {
    "command-r": Rule(_single_digits),
    "gpt-2": Rule(_gpt2),
    "llama-bpe": Rule(_llama3, whole_words=True),
    "qwen2": Rule(_qwen2),
    "refact": Rule(_single_digits),
    "smollm": Rule(_single_digits),
    "starcoder": Rule(_single_digits),
}


def apply_rule(tokenizer: Any, model: str | None, name: str | None) -> None:
    """Give a `tokenizers.Tokenizer` made from a byte-level GGUF vocabulary ("gpt2") the words of
    the rule; other vocabularies cut no words. Raises UnsupportedError for a rule not known here."""
    if model != "gpt2":
        return
    rule = RULES.get(name or "")
    if rule is None:
        raise UnsupportedError(
            f"a tokenizer with the word rule {name!r} (tokenizer.ggml.pre)",
            ", ".join(sorted(RULES)),
            "export from the safetensors checkpoint",
        )
    tokenizer.pre_tokenizer = rule.words()
    if rule.whole_words:
        tokenizer.model.ignore_merges = True
