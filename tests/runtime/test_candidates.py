"""Sessions that give only the largest logits are asked for those where no others matter."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampler import candidates_needed
from trtllm_lite.runtime.sampling_params import SamplingParams

KNOWN = 8
CONFIG = EngineConfig(4, 64, 16, 256, block_size=4)


class FewLogits(FakeSession):
    """Gives no more logits than it is asked for. `asked`: of each run."""

    def __init__(self, known: int) -> None:
        super().__init__(SessionOptions(4, CONFIG.capacity))
        self._known = known
        self.asked: list[int] = []

    @property
    def info(self) -> SessionInfo:
        return replace(super().info, top_logits=self._known)

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        logits = super().run(batch)
        self.asked.append(batch.candidates)
        if 0 < batch.candidates <= self._known:
            best = np.argsort(-logits, axis=-1, kind="stable")[..., : batch.candidates]
            few = np.full_like(logits, -np.inf)
            np.put_along_axis(few, best, np.take_along_axis(logits, best, -1), -1)
            return few
        return logits


def tokens(known: int, *asked: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Of one request for each, all at once; and what the session was asked for."""
    session = FewLogits(known)
    engine = Engine(session, CONFIG, vocab_size=61, eos_token_ids=(60,))
    made: dict[str, list[int]] = {}
    for i, params in enumerate(asked):
        made[str(i)] = []
        common = {"ignore_eos": True, "max_tokens": 12, "seed": i}
        engine.add(Request(str(i), (3, 1, 4 + i), SamplingParams(**{**common, **params})))
    while engine.has_unfinished:
        for event in engine.step():
            assert event.error is None
            made[event.request_id] += [] if event.token_id is None else [event.token_id]
    return list(made.values()), session.asked


GREEDY = {"temperature": 0.0}
TOP = {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.01}


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ((GREEDY,), 1),
        ((GREEDY, GREEDY), 1),
        ((TOP,), 6),
        ((GREEDY, TOP), 6),
        ((TOP, {**TOP, "top_k": 9}), 9),
        (({"temperature": 1.0},), 0),
        ((GREEDY, {"temperature": 1.0, "top_p": 0.9}), 0),
        (({**GREEDY, "logprobs": 2},), 0),
        (({**GREEDY, "repetition_penalty": 1.5},), 0),
        (({**GREEDY, "logit_bias": {5: 4.0}},), 0),
        (({**GREEDY, "min_tokens": 3},), 0),
    ],
)
def test_the_same_tokens_of_fewer_logits(asked: tuple[dict[str, Any], ...], needed: int) -> None:
    few, sizes = tokens(KNOWN, *asked)
    whole, plain = tokens(0, *asked)
    assert few == whole
    assert set(sizes) == {needed}
    # A session that gives all logits is not asked.
    assert set(plain) == {0}


def test_prompt_logprobs_need_the_prompts_logits_and_no_more() -> None:
    _, sizes = tokens(KNOWN, {**GREEDY, "prompt_logprobs": 1})
    assert sizes[0] == 0
    assert set(sizes[1:]) == {1}


def test_a_grammar_looks_at_all_logits() -> None:
    params = SamplingParams(temperature=0.0)
    assert candidates_needed(params, constrained=False) == 1
    assert candidates_needed(params, constrained=True) == 0
