"""What a certificate is made with: varied prompts as token ids.

Text exercises the tokenizer and chat template as users will; a checkpoint without a tokenizer gets
random ids. Lengths are cut to what the bundle holds.
"""

from dataclasses import dataclass

import numpy as np

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.tokenizer import Tokenizer

LONG_PROMPT_TOKENS = 1500
TEXTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n: int) -> int:\n    '''Return the n-th Fibonacci number.'''\n",
    "for (int i = 0; i < n; ++i) {\n    sum += values[i];\n}\n// What does this loop compute?",
    'Complete this JSON: {"name": "Ada", "born": 1815, "fields": ["mathematics", ',
    "SELECT city, COUNT(*) FROM customers GROUP BY city;\nWhat does this query return?",
    "中国的首都是哪里?请用一句话回答。",
    "请写一首关于秋天的短诗。",
    "日本の首都はどこですか。",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "Quelle est la racine carrée de 144 ?",
    "Что такое фотосинтез?",
    "🙂🎉 Which feelings do these two symbols show? 👩‍👩‍👧‍👦 And this one?",
    "café naïve résumé Zürich: which of these words are French?",
    "1, 1, 2, 3, 5, 8, 13, ",
    "Solve step by step: 17 * 23 = ?",
    "    \n\n\tleading blanks and a tab",
    "a",
)
SYSTEM_EMPTY = "Name three colours."
FILLER = (
    "The river ran slowly past the old mill, and every spring the children of the village came to "
    "count the swallows under its roof. In the year {i} they counted {n}, and wrote the number on "
    "the door. Nobody remembered who had written the first one. "
)


@dataclass(frozen=True)
class Prompt:
    """A name to report it by, and its tokens."""

    name: str
    token_ids: tuple[int, ...]


def make_prompts(bundle: Bundle, longest: int) -> list[Prompt]:
    """Twenty varied prompts, the last one long, none over `longest` tokens."""
    if bundle.manifest.tokenizer is None:
        return _random_prompts(bundle.manifest.model.vocab_size, longest)
    tokenizer = Tokenizer.from_bundle(bundle)
    prompts = [_prompt(tokenizer, f"text {i}", [_user(t)], longest) for i, t in enumerate(TEXTS)]
    system = {"role": "system", "content": ""}
    prompts[-1] = _prompt(tokenizer, "empty system", [system, _user(SYSTEM_EMPTY)], longest)
    prompts.append(_long_prompt(tokenizer, longest))
    return prompts


def random_prompt(name: str, vocab_size: int, length: int) -> Prompt:
    """Random ids, the same for the same name."""
    rng = np.random.default_rng(list(name.encode()))
    return Prompt(name, tuple(int(t) for t in rng.integers(0, vocab_size, length)))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _prompt(
    tokenizer: Tokenizer, name: str, messages: list[dict[str, str]], longest: int
) -> Prompt:
    """Through the chat template where there is one and it takes these roles."""
    try:
        text = tokenizer.apply_chat_template(messages)
        ids = tokenizer.encode(text, add_special_tokens=False)
    except RequestError:
        ids = tokenizer.encode(messages[-1]["content"])
    return Prompt(name, tuple(ids[:longest]))


def _long_prompt(tokenizer: Tokenizer, longest: int) -> Prompt:
    wanted = min(LONG_PROMPT_TOKENS, longest)
    text, ids = "", [0]
    i = 0
    while len(ids) < wanted:
        text += "".join(FILLER.format(i=1800 + j, n=7 * j % 50) for j in range(i, i + 10))
        i += 10
        ids = tokenizer.encode(text)
    return Prompt("long", tuple(ids[:wanted]))


def _random_prompts(vocab_size: int, longest: int) -> list[Prompt]:
    lengths = [1 + (7 * i) % min(longest, 48) for i in range(len(TEXTS))]
    lengths.append(min(LONG_PROMPT_TOKENS, longest))
    return [random_prompt(f"random {i}", vocab_size, n) for i, n in enumerate(lengths)]
