"""What is computed from a recorded comparison, and how it is told."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.native_table import TABLE_NAME, VERSION, Copy, NativeTable, to_json
from trtllm_lite.tools.compare_peers.document import (
    advantage,
    best_peer,
    cells,
    dropped,
    median_noise,
    medians,
    memory_rate,
    rounds,
    size_of,
    step_bytes,
)
from trtllm_lite.tools.compare_peers.report import markdown, table, tables, widths
from trtllm_lite.tools.compare_peers.runner import MACHINE
from trtllm_lite.tools.compare_peers.turns import (
    Turn,
    batch_values,
    rotated,
    stream_values,
)

NAMES = ("trtllm-lite int8", "a int8", "b int8", "c int4")


def sample(name: str, kept: bool = True, **values: float) -> dict[str, Any]:
    noise = {"others": 0.02, "steal": 0.01, "round": 2}
    return {"contender": name, "values": values, "kept": kept, **noise}


def recorded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A document as the JSON file holds it."""
    contenders = [
        {
            "name": name,
            "peer": name.split()[0],
            "bits": int(name[-1]),
            "version": "1",
            "bytes": 3 * 2**20,
            "step_bytes": 2**20 if name == NAMES[0] else None,
        }
        for name in NAMES
    ]
    quality = {"perplexity": 10.1, "reference_perplexity": 10.0, "top1": 0.95, "kl": 0.004}
    found = {
        "model": "m",
        "machine": {"cpu": "Some CPU", "physical_cores": 2},
        "commit": "0123456789abcdef",
        "options": {
            **{"threads": 2, "gate": 0.1},
            "memory_rate": {"buffer": 7 * 2**20, "reads": 5},
        },
        "contenders": contenders,
        "skipped": ["d is skipped: no file"],
        "errors": [{"contender": "c int4", "error": "RuntimeError: no"}],
        "samples": samples,
        "quality": {NAMES[0]: {"prefill": quality, "decode": {**quality, "top1": 0.99}}},
        "memory": {NAMES[1]: {"one": {"rss": 2**20, "peak_rss": 5 * 2**20}}},
    }
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


SAMPLES = [
    *(sample(NAMES[0], decode_128=value) for value in (150.0, 160.0, 170.0)),
    sample(NAMES[0], kept=False, decode_128=1.0),
    *(sample(NAMES[1], decode_128=value) for value in (80.0, 100.0)),
    *(sample(NAMES[2], decode_128=value) for value in (120.0, 130.0)),
    sample(NAMES[3], decode_128=500.0),
    sample(NAMES[0], ttft_512=0.3),
    sample(NAMES[1], ttft_512=0.45),
    sample(NAMES[2], ttft_512=0.6, kept=False),
]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0.1, 1e3), st.booleans())))
def test_cells_are_medians_of_what_was_kept(rows: list[tuple[str, float, bool]]) -> None:
    found = cells(recorded([sample(n, kept, load=value) for n, value, kept in rows]))
    for name in NAMES:
        values = [value for n, value, kept in rows if n == name and kept]
        if not values:
            assert name not in found.get("load", {})
            continue
        figures = found["load"][name]
        assert figures["median"] == pytest.approx(median(values))
        assert (figures["min"], figures["max"]) == (min(values), max(values))
        assert figures["count"] == len(values)


def test_less_time_and_more_tokens_are_better() -> None:
    assert advantage("ttft_128", 0.1, 0.2) == pytest.approx(2)
    assert advantage("first_token", 0.1, 0.2) == pytest.approx(2)
    assert advantage("decode_128", 100, 50) == pytest.approx(2)
    assert advantage("total_16", 100, 50) == pytest.approx(2)


def test_the_best_peer_is_of_the_class_and_not_ours() -> None:
    found = recorded(SAMPLES)
    assert best_peer(found, "decode_128", 8) == (NAMES[2], 125.0)
    assert best_peer(found, "decode_128") == (NAMES[3], 500.0)
    assert best_peer(found, "ttft_512", 8) == (NAMES[1], 0.45)
    assert best_peer(found, "ttft_512", 4) is None
    assert best_peer(found, "nothing", 8) is None


def test_our_other_kernels_are_no_peer() -> None:
    found = recorded(SAMPLES)
    found["contenders"][2]["peer"] = "trtllm-lite-ort"
    assert best_peer(found, "decode_128", 8) == (NAMES[1], 90.0)


def test_noise_is_counted() -> None:
    found = recorded(SAMPLES)
    assert dropped(found) == (2, len(SAMPLES))
    assert median_noise(found["samples"]) == (0.02, 0.01)
    assert median_noise([]) == (0.0, 0.0)


def test_the_table_tells_medians_spans_and_ratios() -> None:
    lines = markdown(recorded(SAMPLES)).splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    decode = [line for line in lines if line.startswith(f"| {NAMES[0]} |")][1]
    assert decode == f"| {NAMES[0]} | 160.0 (150.0 to 170.0) x1.28 |"
    assert f"| {NAMES[2]} | **125.0 (120.0 to 130.0) x1.00** |" in lines
    assert f"| {NAMES[0]} | 300 (300 to 300) x1.50 |" in lines
    assert f"| {NAMES[2]} | - |" in lines
    assert rows[f"{NAMES[0]}, prefill"].endswith("| 10.100 | +1.00% | 0.950 | 0.0040 |")
    assert rows[f"{NAMES[0]}, decode"].endswith("| 0.990 | 0.0040 |")
    assert rows[NAMES[1]] == f"| {NAMES[1]} | 1 | 5 | 3 | - | - | - | - |"


def test_widths_have_tables_of_their_own() -> None:
    found = recorded(SAMPLES)
    assert widths(found) == [8, 4]
    assert NAMES[3] not in tables(found, 8)
    assert f"| {NAMES[3]} | **500.0 (500.0 to 500.0) x1.00** |" in tables(found, 4)
    assert "perplexity" not in tables(found, 4)
    assert markdown(found).count("### m, ") == 2


def test_long_prompts_are_set_against_a_short_one() -> None:
    took = {NAMES[0]: (0.5, 1.5, 10.0), NAMES[1]: (1.0, 2.0, 4.0)}
    samples = [
        sample(name, long_ttft_1024=a, long_ttft_2048=b, long_ttft_8160=c)
        for name, (a, b, c) in took.items()
    ]
    found = recorded(samples)
    assert medians(found)["growth_2048"] == {NAMES[0]: 3.0, NAMES[1]: 2.0}
    lines = tables(found, 8).splitlines()
    assert "|  | 2048 tokens (2 times as many) | 8160 tokens (8 times as many) |" in lines
    assert f"| {NAMES[0]} | 3.00 | 20.00 |" in lines
    assert f"| {NAMES[2]} | - | - |" in lines
    assert "Growth" not in tables(found, 4)
    assert advantage("growth_2048", 3.0, 2.0) == pytest.approx(2 / 3)


def test_growth_needs_the_short_prompt() -> None:
    assert medians(recorded([sample(NAMES[0], long_ttft_2048=1.0)]))["growth_2048"] == {}


def test_weights_read_while_decoding_are_set_against_memory() -> None:
    rates = [sample(MACHINE, memory_rate=rate) for rate in (4e8, 2e8, 3e8)]
    found = recorded([*SAMPLES, *rates, sample(MACHINE, kept=False, memory_rate=9e9)])
    assert memory_rate(found) == (3e8, 3)
    share = 2**20 * 160 / 3e8
    assert medians(found)["memory_share"] == pytest.approx({NAMES[0]: share})
    text = tables(found, 8)
    assert "Memory gives 0.3 GB/s to 2 threads that read a buffer of 7 MiB (median of 3" in text
    assert "each the best of 5 reads)." in text
    assert f"| {NAMES[0]} | 1.0 | 160.0 | 0.2 | {share:.0%} |" in text
    assert "Memory gives" not in tables(found, 4)
    assert MACHINE not in text


def test_a_document_without_the_rate_of_memory_says_nothing_of_it() -> None:
    found = recorded(SAMPLES)
    assert memory_rate(found) is None
    assert "memory_share" not in medians(found)
    assert "Memory gives" not in tables(found, 8)


def test_the_worse_path_is_the_loss() -> None:
    found = recorded([])
    found["quality"][NAMES[0]]["decode"]["kl"] = 0.009
    assert medians(found)["kl"] == {NAMES[0]: 0.009}
    assert medians(found)["perplexity"] == pytest.approx({NAMES[0]: 1.01})
    assert medians(found)["rss"] == {NAMES[1]: 2**20}


def test_rounds_are_counted() -> None:
    assert rounds(recorded(SAMPLES)) == 3
    assert rounds(recorded([])) == 0
    assert "3 rounds in which" in markdown(recorded(SAMPLES))


def test_bytes_of_a_step_are_those_of_packed_weights(tmp_path: Path) -> None:
    assert step_bytes(tmp_path) is None
    table = NativeTable(VERSION, 1000, (), (Copy(0, 0, 64), Copy(64, 64, 36)))
    (tmp_path / TABLE_NAME).write_text(json.dumps(to_json(table)))
    assert step_bytes(tmp_path) == 900


def test_what_was_left_out_is_said() -> None:
    text = markdown(recorded(SAMPLES))
    assert f"2 of {len(SAMPLES)} turns were dropped: others used over 10% of the CPUs" in text
    assert "d is skipped: no file." in text
    assert "c int4 failed: RuntimeError: no." in text
    assert "`0123456789ab`" in text


def test_a_metric_nobody_has_makes_no_table() -> None:
    assert "requests" not in markdown(recorded(SAMPLES)).replace("one request", "")


def test_a_table_aligns_figures() -> None:
    assert table(["", "x"], [["a", "1"]]) == "|  | x |\n| --- | ---: |\n| a | 1 |"


def test_rates_leave_the_first_token_out() -> None:
    turn = Turn("stream", 128, 3)
    values = stream_values(turn, [0.5, 0.75, 1.0])
    assert values == pytest.approx({"ttft_128": 0.5, "decode_128": 4.0})
    assert stream_values(Turn("stream", 512, 1), [0.5]) == {"ttft_512": 0.5}
    long = stream_values(Turn("long", 1024, 2), [0.5, 0.75])
    assert long == pytest.approx({"long_ttft_1024": 0.5, "long_decode_1024": 4.0})


def test_a_batchs_rate_counts_all_requests() -> None:
    assert batch_values(Turn("batch", 128, 64, 4), {"seconds": 2.0}) == {"total_4": 128.0}


@given(st.lists(st.text(), unique=True, min_size=1), st.integers(0, 50))
def test_each_round_starts_with_another(names: list[str], by: int) -> None:
    turned = rotated(names, by)
    assert sorted(turned) == sorted(names)
    assert turned[0] == names[by % len(names)]
    assert [*turned, *turned][-len(names) - by % len(names) :][: len(names)] == names


def test_sizes_of_files_folders_and_bundles(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"x" * 5)
    assert size_of(tmp_path / "a") == 10
    assert size_of(tmp_path) == 15
    manifest = {"files": [{"path": "a", "size": 10}, {"path": "c", "size": 7}]}
    (tmp_path / "bundle.json").write_text(json.dumps(manifest))
    assert size_of(tmp_path) == 17
