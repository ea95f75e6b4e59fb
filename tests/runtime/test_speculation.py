"""When drafts are made, how long they are, and what they may cost at most."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import DecodeCost
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.request import Request, Sequence
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.speculation import EARNED, FIRST_CREDIT, MAX_ROWS, Speculator

LOOP = [1, 2, 3, 4, 5]


def speculator(recompute_at: int | None = None, **changes: Any) -> Speculator:
    options: dict[str, Any] = {"speculation": "ngram", **changes}
    budget, cost = options.pop("budget", 256), options.pop("cost", DecodeCost(0.12))
    config = EngineConfig(16, 10_000, budget, 100_000, **options)
    return Speculator(config, eos_token_ids=(9,), recompute_at=recompute_at, cost=cost)


def sequence(tokens: list[int], max_length: int = 10_000, **params: Any) -> Sequence:
    request = Request("r", tuple(tokens), SamplingParams(**params))
    return Sequence(request, 0, list(tokens), max_length)


def accept(made: Speculator, row: Sequence, tokens: list[int] | None = None) -> int:
    """One step in which the draft is right, or right up to where it departs from `tokens`; returns
    the length of the draft."""
    draft = made.drafts([row]).get(row, ())
    given = list(draft) if tokens is None else tokens
    right = 0
    while right < min(len(draft), len(given)) and draft[right] == given[right]:
        right += 1
    if draft:
        made.learn(row, len(draft), right)
    row.token_ids += [*draft[:right], given[right] if right < len(given) else 7]
    return len(draft)


def test_the_first_tokens_of_a_run_are_free_and_others_cost_the_same_each() -> None:
    cost = DecodeCost(0.25, free=3.0)
    assert [cost.of(tokens) for tokens in (1, 3, 4, 7)] == [1.0, 1.0, 1.25, 2.0]
    assert [DecodeCost(0.5).of(tokens) for tokens in (1, 2, 3)] == [1.0, 1.5, 2.0]


def test_free_tokens_are_always_tried_and_those_of_other_rows_are_counted() -> None:
    free = DecodeCost(1.0, free=3.0)
    alone = speculator(cost=free)
    row = sequence(LOOP * 3)
    for _ in range(50):
        assert len(alone.drafts([row])[row]) == 2
        alone.learn(row, 2, 0)
        row.token_ids += LOOP
    rows = [sequence(LOOP * 3) for _ in range(3)]
    assert speculator(cost=free).drafts(rows) == {}


def test_a_draft_is_what_came_after_the_same_tokens() -> None:
    row = sequence([5, 6, 7, 8, 0, 5, 6])
    draft = speculator().drafts([row])[row]
    assert draft == (7, 8, 0, 5)[: len(draft)]


def test_text_that_does_not_repeat_gets_no_draft_and_no_record() -> None:
    made, row = speculator(), sequence(list(range(20, 60)))
    assert made.drafts([row]) == {}
    assert made.drafts([]) == {}


def test_right_drafts_grow_and_wrong_ones_end() -> None:
    made, row = speculator(), sequence(LOOP * 3)
    lengths = []
    for _ in range(6):
        draft = made.drafts([row])[row]
        made.learn(row, len(draft), len(draft))
        row.token_ids += [*draft, LOOP[(len(row.token_ids) + len(draft)) % 5]]
        lengths.append(len(draft))
    assert lengths == sorted(lengths)
    assert (lengths[0] < 16, lengths[-1]) == (True, 16)
    wrong = []
    for _ in range(40):
        draft = made.drafts([row]).get(row, ())
        if draft:
            made.learn(row, len(draft), 0)
        row.token_ids += LOOP
        wrong.append(len(draft))
    assert (wrong[0], max(wrong[-20:])) == (16, 1)


def test_a_draft_that_costs_more_is_shorter() -> None:
    def first(slope: float) -> int:
        row = sequence(LOOP * 3)
        return len(speculator(cost=DecodeCost(slope)).drafts([row]).get(row, ()))

    assert [first(slope) for slope in (0.01, 0.1, 0.4, 0.6)] == [4, 2, 1, 0]


@pytest.mark.parametrize(
    ("max_length", "recompute_at", "budget", "most", "expected"),
    [
        (10_000, None, 256, 16, 16),
        (10_000, None, 256, 3, 2),
        # 15 tokens are there; one is drawn behind the draft.
        (17, None, 256, 16, 1),
        (16, None, 256, 16, 0),
        (20, None, 256, 16, 4),
        (10_000, 19, 256, 16, 4),
        (10_000, 15, 256, 16, 0),
        (10_000, 14, 256, 16, 16),
        (10_000, None, 9, 16, 8),
        (10_000, None, 1, 16, 0),
    ],
)
def test_a_draft_ends_where_the_sequence_may_not_go(
    max_length: int, recompute_at: int | None, budget: int, most: int, expected: int
) -> None:
    made = speculator(recompute_at, budget=budget, max_draft_tokens=most, cost=DecodeCost(0.01))
    row = sequence(LOOP * 3, max_length)
    trust(made, row)
    assert len(made.drafts([row]).get(row, ())) == expected


def trust(made: Speculator, row: Sequence) -> None:
    """As if many drafts of the row had been right."""
    if made.drafts([row]):
        for _ in range(100):
            made.learn(row, 16, 16)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, (1, 2)),
        ({"ignore_eos": True}, (1, 2, 9, 3)),
        ({"stop_token_ids": (2,)}, (1,)),
        ({"stop_token_ids": (1,)}, ()),
    ],
)
def test_a_draft_holds_no_token_that_ends_the_sequence(
    params: dict[str, Any], expected: tuple[int, ...]
) -> None:
    made, row = speculator(max_draft_tokens=4), sequence([4, 5, 1, 2, 9, 3, 0, 4, 5], **params)
    trust(made, row)
    assert made.drafts([row]).get(row, ()) == expected


@pytest.mark.parametrize(
    ("engine", "request_", "expected"),
    [
        ("ngram", None, True),
        ("ngram", True, True),
        ("ngram", False, False),
        ("off", None, False),
        ("off", True, True),
        ("off", False, False),
    ],
)
def test_a_request_may_choose_for_itself(
    engine: str, request_: bool | None, expected: bool
) -> None:
    row = sequence(LOOP * 3, speculation=request_)
    assert bool(speculator(speculation=engine).drafts([row])) == expected


def test_rows_share_one_length_and_the_price() -> None:
    made = speculator(cost=DecodeCost(0.01))
    rows = [sequence(LOOP * 3), sequence(list(range(20, 40))), sequence([7, 8] * 8)]
    drafts = made.drafts(rows)
    assert set(drafts) == {rows[0], rows[2]}
    assert len({len(d) for d in drafts.values()}) == 1
    many = [sequence(LOOP * 3) for _ in range(MAX_ROWS + 1)]
    assert made.drafts(many) == {}


def test_forgotten_sequences_leave_nothing() -> None:
    made, row = speculator(), sequence(LOOP * 3)
    made.drafts([row])
    made.forget(row)
    made.forget(row)
    assert made._drafters == {}


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=40, max_size=400),
    copies=st.integers(1, 3),
    slope=st.floats(0.04, 3.0),
)
def test_a_sequence_never_loses_more_than_its_credit(
    tokens: list[int], copies: int, slope: float
) -> None:
    """Whatever the text is, as long as runs cost what they are said to: time in one-token runs."""
    made, text = speculator(cost=DecodeCost(slope)), tokens * copies
    row = sequence(text[:10])
    spent = 0.0
    while len(row.token_ids) < len(text):
        draft = accept(made, row, text[len(row.token_ids) :])
        spent += 1.0 + slope * draft
    generated = len(row.token_ids) - 10
    assert spent <= generated * (1.0 + EARNED) + FIRST_CREDIT + 1e-6
