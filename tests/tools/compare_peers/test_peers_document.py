"""What is computed from a recorded comparison, and how it is told."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.tools.compare_peers.document import (
    advantage,
    best_peer,
    cells,
    dropped,
    median_noise,
    size_of,
)
from trtllm_lite.tools.compare_peers.report import markdown, table
from trtllm_lite.tools.compare_peers.turns import (
    Turn,
    batch_values,
    rotated,
    stream_values,
)

NAMES = ("trtllm-lite int8", "a int8", "b int8", "c int4")


def sample(name: str, kept: bool = True, **values: float) -> dict[str, Any]:
    noise = {"others": 0.02, "steal": 0.01}
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
        }
        for name in NAMES
    ]
    quality = {"perplexity": 10.1, "reference_perplexity": 10.0, "top1": 0.95, "kl": 0.004}
    found = {
        "model": "m",
        "machine": {"cpu": "Some CPU", "physical_cores": 2},
        "commit": "0123456789abcdef",
        "options": {"threads": 2, "rounds": 3, "gate": 0.1},
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
    assert rows[NAMES[1]] == f"| {NAMES[1]} | 1 | - | 5 | 3 | - | - | - | - |"


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
