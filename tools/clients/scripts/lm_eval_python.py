"""The lm-eval package, model `local-completions`: scores of a small local task.

The figures have to be those that the runner computed in process (`reference.py`).
"""

import json
import os
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target

HERE = Path(__file__).parent
TASK = "trtllm_lite_facts"
TOLERANCE = 1e-4
"""Of a log-likelihood, in nats: what float32 leaves when a batch is cut another way."""


def scores(target: Target) -> None:
    want = json.loads(Path(target.reference).read_text(encoding="utf-8"))
    made = _evaluate(target)
    for name in ("acc", "acc_norm"):
        assert made["results"][TASK][f"{name},none"] == want[name], name
    samples = sorted(made["samples"][TASK], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(want["scores"])
    for sample, expected in zip(samples, want["scores"], strict=True):
        found = [float(pair[0]) for pair in sample["filtered_resps"]]
        differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
        assert max(differences) <= TOLERANCE, f"item {sample['doc_id']}: {found}, not {expected}"


def the_task_tells_models_apart(target: Target) -> None:
    """A task that every item of is right, or wrong, would prove nothing."""
    want = json.loads(Path(target.reference).read_text(encoding="utf-8"))
    assert 0.2 < want["acc"] < 1


def _evaluate(target: Target) -> Any:
    folder = Path(target.folder)
    os.environ["OPENAI_API_KEY"] = target.key
    # The task's file names its data from the working directory.
    for name in ("facts.yaml", "facts.json"):
        (folder / name).write_bytes((HERE / name).read_bytes())
    os.chdir(folder)
    arguments = {
        "model": target.model,
        "base_url": f"{target.base}/completions",
        "tokenizer": str(_tokenizer(target, folder)),
        **{"num_concurrent": 2, "max_retries": 1, "tokenized_requests": True, "batch_size": 4},
    }
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
        log_samples=True,
    )


def _tokenizer(target: Target, folder: Path) -> Path:
    """The bundle's tokenizer as a folder that transformers opens."""
    made = folder / "tokenizer"
    made.mkdir(exist_ok=True)
    source = Path(target.bundle) / "tokenizer.json"
    (made / "tokenizer.json").write_bytes(source.read_bytes())
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")
    # Same ids, or the scores would be of another text.
    assert raw.tokens_of(target, "naïve 水")
    return made
