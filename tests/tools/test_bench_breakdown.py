"""bench --breakdown: spreads against a plain computation, and tables that hold all of them."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.step_timer import PARTS, StepTimes
from trtllm_lite.tools.bench_breakdown import breakdown, breakdown_tables

seconds = st.tuples(*(st.floats(0, 10) for _ in PARTS))
steps = st.builds(
    StepTimes,
    st.integers(0, 2),
    st.integers(0, 9),
    st.integers(0, 2),
    st.integers(0, 9),
    seconds,
)


@given(st.lists(steps, max_size=12))
def test_every_part_of_every_phase_is_reported(measured: list[StepTimes]) -> None:
    found = breakdown(iter(measured))
    assert set(found) == {step.phase for step in measured}
    for phase, values in found.items():
        mine = [s for s in measured if s.phase == phase]
        assert values["steps"] == len(mine)
        assert values["decode_tokens"]["max"] == max(s.decode_tokens for s in mine)
        assert values["prefill_rows"]["min"] == min(s.prefill_rows for s in mine)
        for i, part in enumerate(PARTS):
            times = [s.seconds[i] for s in mine]
            expected = {"median": median(times), "min": min(times), "max": max(times)}
            assert values["seconds"][part] == expected | {"count": len(mine)}
        assert values["seconds"]["total"]["max"] == max(s.total for s in mine)
        assert values["seconds"]["overhead"]["max"] == max(s.overhead for s in mine)


def test_a_table_a_point_with_parts_as_rows_and_phases_as_columns() -> None:
    decode = [StepTimes(2, 2, 0, 0, (i * 1e-3,) * len(PARTS)) for i in (1, 2, 4)]
    prefill = StepTimes(0, 0, 1, 9, (5e-3,) * len(PARTS))
    one = {"input_len": 128, "output_len": 64, "concurrency": 2}
    results = [
        one | {"breakdown": breakdown([*decode, prefill])},
        one | {"concurrency": 1, "breakdown": breakdown(decode)},
    ]
    first, second = breakdown_tables({"results": results})
    assert first.title.startswith("128 in, 64 out, 2 at once")
    assert first.columns == ("", "prefill (1 steps)", "decode (3 steps)")
    assert [row[0] for row in first.rows] == [*PARTS, "all but run", "whole step"]
    cells = dict(zip((row[0] for row in first.rows), first.rows, strict=True))
    assert cells["run"][1:] == ("5.000 [5.000, 5.000]", "2.000 [1.000, 4.000]")
    assert cells["all but run"][2] == "12.000 [6.000, 24.000]"
    assert cells["whole step"][2] == "14.000 [7.000, 28.000]"
    assert second.columns == ("", "decode (3 steps)")
