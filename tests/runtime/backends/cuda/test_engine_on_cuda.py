"""The engine on the session over the CUDA provider: continuous batching, chunks, kept prefixes and
preemption, with the tokens that a run of its own gives each request."""

from typing import Any

import pytest

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.engine_thread import Delivery, EngineThread
from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.mailbox import WaitingMailbox
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.request_maker import Job
from trtllm_lite.runtime.sampling_params import SamplingParams

VOCAB, MODEL_LEN, CHUNK = 40, 48, 8
PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
    [3, 1, 4, 1, 5, 9, 2, 6, 30],
    [7],
    [20, 21, 22],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2],
]


def alone(rig: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(rig.expected(ids).argmax()))
    return ids[len(prompt) :]


def test_a_lost_gpu_ends_every_request_and_the_engine(
    make_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The running ones, those that wait, and those that come later."""
    config = EngineConfig(2, MODEL_LEN, CHUNK, 2 * MODEL_LEN)
    rig = make_rig(num_slots=2, capacity=config.capacity)
    thread = EngineThread(Engine(rig.session, config, vocab_size=VOCAB, eos_token_ids=()), None)
    steps = []

    def breaks(options: Any) -> None:
        steps.append(1)
        if len(steps) == 5:
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")

    rig.inference.before_run = breaks
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    boxes = [WaitingMailbox() for _ in PROMPTS]
    deliveries = [
        Delivery(Job(Request(str(i), tuple(prompt), params), None), box, final_only=True)
        for i, (prompt, box) in enumerate(zip(PROMPTS, boxes, strict=True))
    ]
    thread.submit(deliveries).result()
    for box in boxes:
        with pytest.raises(EngineDeadError, match=r"lost to this process.*CUDA failure 700"):
            box.wait()
    with pytest.raises(EngineDeadError, match="has to be started again"):
        thread.stats()
    thread.close()
    assert "the engine thread died" in caplog.text


@pytest.mark.parametrize("kv_tokens", [4 * MODEL_LEN, 60])
def test_each_request_gets_its_own_tokens(make_rig: Any, kv_tokens: int) -> None:
    """With room for 60 tokens in all, sequences are preempted and come back."""
    config = EngineConfig(4, MODEL_LEN, CHUNK, kv_tokens, block_size=4, check_invariants=True)
    rig = make_rig(num_slots=4, capacity=config.capacity)
    engine = Engine(rig.session, config, vocab_size=VOCAB, eos_token_ids=())
    made: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        made[str(i)] = []
        params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        engine.add(Request(str(i), tuple(prompt), params))
    while engine.has_unfinished:
        for event in engine.step():
            assert event.error is None
            made[event.request_id] += [] if event.token_id is None else [event.token_id]
    assert list(made.values()) == [alone(rig, prompt, 14) for prompt in PROMPTS]
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert (stats.preemptions > 0) == (kv_tokens == 60)
    assert rig.inference.replays > 0
    engine.close()
    assert rig.device.addresses == ()
