"""Requests that arrive together: their prompts are computed one after the other, and who has a
first token decodes while the others wait."""

from dataclasses import dataclass

from trtllm_lite.runtime.planning.roofline import Bound, Machine
from trtllm_lite.runtime.planning.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """Of one request in the middle: seconds to its first token, and for each later one. Output
    tokens a second of all together. `bound`: what a decode step waits for."""

    ttft: float
    tpot: float
    tokens_per_second: float
    bound: Bound


def predict(
    workload: Workload, machine: Machine, requests: int, prompt_tokens: int, new_tokens: int
) -> Prediction:
    """`requests` of `prompt_tokens` that arrive at once and want `new_tokens` each."""
    prompt = machine.prompt(workload, prompt_tokens).seconds
    step = machine.step(workload, requests, prompt_tokens + new_tokens // 2)
    later = max(1, new_tokens - 1)
    # A prompt that is computed after a row's first token stands between two of its tokens.
    waiting = (requests - 1) / 2 * prompt / later
    total = requests * prompt + (new_tokens - 1) * step.seconds
    return Prediction(
        ttft=(requests + 1) / 2 * prompt,
        tpot=step.seconds + waiting,
        tokens_per_second=requests * new_tokens / total,
        bound=step.bound,
    )
