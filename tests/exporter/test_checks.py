"""The measurements behind the gates: zero for equal sides, the distance for unequal ones."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from trtllm_lite.exporter.certificate import UNBOUNDED
from trtllm_lite.exporter.checks import Checks, Findings
from trtllm_lite.exporter.prompts import Prompt
from trtllm_lite.exporter.reference import Reference, relative_kl
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.progress import NoProgress

VOCAB = 61
PROMPTS = [Prompt("a", (1, 2, 3)), Prompt("b", (4,)), Prompt("c", tuple(range(12)))]
Change = Callable[[Batch, Any], Any]


class Warped(FakeSession):
    """A fake session whose logits a test may change on their way out."""

    def __init__(self, change: Change, recompute_at: int | None = None) -> None:
        options = SessionOptions(num_slots=4, capacity=128)
        super().__init__(options, vocab_size=VOCAB, recompute_at=recompute_at)
        self._change = change

    def run(self, batch: Batch) -> Any:
        return self._change(batch, super().run(batch).copy())


class FakeReference(Reference):
    """The fake model, computed from all tokens at once: one regime for the whole row."""

    def __init__(self, recompute_at: int | None = None) -> None:
        options = SessionOptions(num_slots=1, capacity=8)
        self._fake = FakeSession(options, vocab_size=VOCAB, recompute_at=recompute_at)

    def logits(self, token_ids: Sequence[int], last: int) -> Any:
        cache = self._fake.model.keys_values(np.asarray(token_ids), len(token_ids))
        positions = np.arange(len(token_ids) - last, len(token_ids))
        return self._fake.model.logits(cache, positions)


def same(batch: Batch, logits: Any) -> Any:
    return logits


def checks(change: Change = same, recompute_at: int | None = None) -> Checks:
    reference = FakeReference(recompute_at)
    return Checks(Warped(change, recompute_at), reference, recompute_at, NoProgress())


def findings_of(made: Checks, num_tokens: int = 6) -> Findings:
    found = Findings()
    made.greedy_against_reference(PROMPTS, num_tokens, found)
    made.alone(PROMPTS, num_tokens, found)
    made.chunked(PROMPTS[2], (1, 5, 40), found)
    made.decode_equals_prefill(PROMPTS[2], found)
    return found


NAMES = {"logits", "batched_equals_alone", "chunked_equals_whole", "decode_equals_prefill"}


@pytest.mark.parametrize("recompute_at", [None, 5, 15])
def test_equal_sides(recompute_at: int | None) -> None:
    found = findings_of(checks(recompute_at=recompute_at))
    assert found.distances == dict.fromkeys(NAMES, 0.0)
    assert (found.agreed, found.compared) == (18, 18)
    assert [p.first_divergence for p in found.prompts] == [None] * 3
    assert [(p.name, p.prompt_tokens, p.new_tokens) for p in found.prompts] == [
        (p.name, len(p.token_ids), 6) for p in PROMPTS
    ]
    assert max(p.kl for p in found.prompts) == 0.0
    assert found.greedy_gap == 0.0
    assert found.logit_scale > 1.0


def at_row_length(length: int, by: float) -> Change:
    """Move one logit of rows that hold `length` tokens."""

    def change(batch: Batch, logits: Any) -> Any:
        for row in range(batch.rows):
            if batch.past_lens[row] + batch.query_lens[row] == length:
                logits[row, ..., 0] += by
        return logits

    return change


def test_a_distance_is_found_where_it_is() -> None:
    found = Findings()
    checks(at_row_length(5, -0.25)).greedy_against_reference(PROMPTS, 6, found)
    by_name = {p.name: p for p in found.prompts}
    assert [by_name[n].max_abs for n in "abc"] == pytest.approx([0.25, 0.25, 0.0])
    assert by_name["a"].kl > 0
    assert found.distances["logits"] == pytest.approx(0.25)


def test_a_divergence_is_found_where_it_is() -> None:
    found = Findings()
    checks(at_row_length(5, 100.0)).greedy_against_reference(PROMPTS, 6, found)
    by_name = {p.name: p for p in found.prompts}
    # "a" has 3 tokens, so the logits after its 5th choose the third new one.
    assert by_name["a"].first_divergence == 2
    assert by_name["b"].first_divergence == 4
    assert by_name["c"].first_divergence is None
    assert (found.agreed, found.compared) == (16, 18)
    assert len(found.worst_tokens) in (3 + 5, 1 + 5)
    # What the reference thinks of token 0 there, beside what it would have chosen.
    assert 0.0 < found.greedy_gap < 100.0


def test_the_worst_prompt_is_kept_for_the_diagnosis() -> None:
    found = Findings()
    checks(at_row_length(14, 50.0)).greedy_against_reference(PROMPTS, 6, found)
    assert found.worst_tokens[:12] == list(PROMPTS[2].token_ids)
    assert len(found.worst_tokens) == 12 + 5


def test_nan_is_the_worst_distance() -> None:
    found = findings_of(checks(lambda batch, logits: logits * np.nan))
    assert found.distances == dict.fromkeys(NAMES, float("inf"))
    assert {(p.max_abs, p.kl) for p in found.prompts} == {(UNBOUNDED, UNBOUNDED)}
    assert found.worst_tokens


def test_nan_in_one_prompt_alone() -> None:
    """Whatever comes after it, it stays."""
    found = Findings()
    checks(at_row_length(2, float("nan"))).greedy_against_reference(PROMPTS, 6, found)
    assert found.distances["logits"] == float("inf")
    assert [p.kl == UNBOUNDED for p in found.prompts] == [False, True, False]
    assert found.worst_tokens[:1] == [4]


def test_infinite_logits_raise_no_warning() -> None:
    found = Findings()
    checks(at_row_length(5, float("inf"))).greedy_against_reference(PROMPTS, 6, found)
    assert found.distances["logits"] == float("inf")


def only(phase: str, rows: int | None = None, seq: int | None = None) -> Change:
    """Move the logits of runs of that shape."""

    def change(batch: Batch, logits: Any) -> Any:
        fits = batch.phase == phase and rows in (None, batch.rows)
        return logits + 1.0 if fits and seq in (None, batch.token_ids.shape[1]) else logits

    return change


def test_each_check_looks_at_its_own() -> None:
    found = Findings()
    checks(only("decode", rows=1)).alone(PROMPTS, 6, found)
    assert found.distances["batched_equals_alone"] > 0
    checks(only("prefill", seq=12)).chunked(PROMPTS[2], (5,), found)
    assert found.distances["chunked_equals_whole"] > 0
    checks(only("decode")).decode_equals_prefill(PROMPTS[2], found)
    assert found.distances["decode_equals_prefill"] > 0


def test_decode_equals_prefill_of_one_token() -> None:
    found = Findings()
    checks().decode_equals_prefill(Prompt("one", (5,)), found)
    assert found.distances == {"decode_equals_prefill": 0.0}


def test_the_reference_sees_each_token_in_its_own_regime() -> None:
    """A prompt of 3 that passes a switch at 5 has two new tokens of the first regime."""
    found = Findings()
    checks(recompute_at=5).greedy_against_reference([PROMPTS[0]], 6, found)
    assert found.distances["logits"] == 0.0
    blind = Checks(Warped(same, 5), FakeReference(5), None, NoProgress())
    blind.greedy_against_reference([PROMPTS[0]], 6, found)
    assert found.distances["logits"] > 0


def test_kl() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 9)).astype(np.float32)
    p, q = (np.exp(x.astype(np.float64)) for x in (a, b))
    p, q = p / p.sum(), q / q.sum()
    assert relative_kl(a, b) == pytest.approx(float((p * np.log(p / q)).sum()))
    assert relative_kl(a, a) == 0.0
    assert relative_kl(a, a + np.float32(50)) == pytest.approx(0.0, abs=1e-5)
