"""The figures of the small task, computed in process: what lm-eval has to find over HTTP."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.tools.clients.catalogue import SCRIPTS

ITEMS = SCRIPTS / "facts.json"
SCORE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def write_reference(bundle: Path, path: Path) -> None:
    """Score the task's items with the bundle. Raises BundleError."""
    items = json.loads(ITEMS.read_text(encoding="utf-8"))
    with LLM(bundle) as llm:
        figures = score(llm, items)
    path.write_text(json.dumps(figures), encoding="utf-8")


def score(llm: LLM, items: Sequence[Any]) -> dict[str, Any]:
    """`scores`: the log-likelihood of each choice after its question, in nats. `acc`: how often
    the right choice has the highest; `acc_norm`: the highest by character, as lm-eval has it."""
    scores = [
        [_log_likelihood(llm, item["question"], c) for c in item["choices"]] for item in items
    ]
    plain, normal = [], []
    for item, found in zip(items, scores, strict=True):
        lengths = [len(choice) for choice in item["choices"]]
        by_length = [value / n for value, n in zip(found, lengths, strict=True)]
        plain.append(_best(found) == item["answer"])
        normal.append(_best(by_length) == item["answer"])
    return {"acc": _mean(plain), "acc_norm": _mean(normal), "scores": scores}


def _log_likelihood(llm: LLM, question: str, choice: str) -> float:
    """Blanks at the question's end count as the choice's: tokens begin with them."""
    context = question.rstrip()
    whole = llm.tokenizer.encode(question + choice, add_special_tokens=False)
    start = len(llm.tokenizer.encode(context, add_special_tokens=False))
    (output,) = llm.generate(prompt_token_ids=list(whole), params=SCORE)
    scored = output.prompt_logprobs or []
    entries = [next(iter(entry.values())) for entry in scored[start:] if entry]
    assert len(entries) == len(whole) - start, "every token of the choice has a score"
    return sum(entry.logprob for entry in entries)


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _mean(values: Iterable[bool]) -> float:
    made = list(values)
    return sum(made) / len(made)
