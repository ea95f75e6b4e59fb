"""What each cell has to reach, and which do not."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.tools.compare_peers.bars import BARS, STEP_BYTES, Verdict, verdicts

OURS, EXACT, ORT = "trtllm-lite int8", "trtllm-lite int8-exact", "trtllm-lite int8-ort"
PEERS = {OURS: "trtllm-lite", EXACT: "trtllm-lite-exact", ORT: "trtllm-lite-ort"}
NAMES = (OURS, EXACT, ORT, "llama.cpp Q8_0", "other int8")


def document(
    speeds: Mapping[str, Mapping[str, float]],
    memory: Mapping[str, int] | None = None,
    losses: Mapping[str, float] | None = None,
    bits: int = 8,
    step: int | None = None,
) -> dict[str, Any]:
    """As much of a recorded document as verdicts look at. speeds: metric, then contender."""
    return {
        "model": "m",
        "contenders": [
            {
                "name": name,
                "peer": PEERS.get(name, name.split()[0]),
                "bits": bits,
                "step_bytes": step if name in PEERS else None,
            }
            for name in NAMES
        ],
        "samples": [
            {"contender": name, "values": {metric: value}, "kept": True}
            for metric, row in speeds.items()
            for name, value in row.items()
        ],
        "memory": {name: {"one": {"rss": rss}} for name, rss in (memory or {}).items()},
        "quality": {
            name: {"prefill": {"kl": kl, "perplexity": 10 + kl, "reference_perplexity": 10.0}}
            for name, kl in (losses or {}).items()
        },
    }


def judged(found: Mapping[str, Any], bits: int = 8) -> dict[str, Verdict]:
    return {verdict.bar.key: verdict for verdict in verdicts(found, bits)}


def three(ours: float, llama: float, other: float) -> dict[str, float]:
    return {OURS: ours, EXACT: 1e9, ORT: 1e9, "llama.cpp Q8_0": llama, "other int8": other}


def test_more_tokens_are_judged_against_the_best_peer() -> None:
    found = document({"decode_128": three(124.0, 100.0, 90.0)})
    verdict = judged(found)["decode_128"]
    assert (verdict.ours, verdict.rival, verdict.other) == (OURS, "llama.cpp Q8_0", 100.0)
    assert verdict.behind
    assert not judged(document({"decode_128": three(126.0, 100.0, 90.0)}))["decode_128"].behind


def test_less_time_is_judged_against_the_best_peer() -> None:
    verdict = judged(document({"ttft_512": three(0.31, 0.7, 0.33)}))["ttft_512"]
    assert (verdict.rival, verdict.behind) == ("other int8", True)
    assert verdict.text() == (
        "time to the first token, 512 tokens: 310 ms, 1.06 times as good as other int8 (330 ms); "
        "the bar is 1.10"
    )
    assert not judged(document({"ttft_512": three(0.3, 0.7, 0.33)}))["ttft_512"].behind


def test_four_bits_have_a_bar_of_their_own() -> None:
    found = document({"decode_128": three(124.0, 100.0, 90.0), "ttft_128": three(1, 1, 1)}, bits=4)
    assert set(judged(found, 4)) == {"decode_128"}
    assert not judged(found, 4)["decode_128"].behind
    assert judged(found, 8) == {}


def test_growth_is_judged_against_the_peer_that_is_fastest_there() -> None:
    short = {OURS: 1.0, "llama.cpp Q8_0": 2.0, "other int8": 1.0}
    long = {OURS: 5.0, "llama.cpp Q8_0": 8.0, "other int8": 5.5}
    found = document({"long_ttft_1024": short, "long_ttft_4096": long})
    verdict = judged(found)["growth_4096"]
    assert (verdict.rival, verdict.other, verdict.behind) == ("other int8", 5.5, False)
    long[OURS] = 5.6
    verdict = judged(document({"long_ttft_1024": short, "long_ttft_4096": long}))["growth_4096"]
    assert (verdict.rival, verdict.behind) == ("other int8", True)


def test_memory_is_judged_against_llama_cpp_whatever_is_best() -> None:
    memory = {OURS: 116, ORT: 159, "llama.cpp Q8_0": 100, "other int8": 10}
    found = judged(document({}, memory))
    assert found["rss"].behind
    assert found["rss"].text().endswith("1.16 times llama.cpp Q8_0 (0 MiB); the bar is 1.15")
    assert (found["rss_two_formats"].ours, found["rss_two_formats"].behind) == (ORT, False)
    better = judged(document({}, {**memory, OURS: 114, ORT: 161}))
    assert (better["rss"].behind, better["rss_two_formats"].behind) == (False, True)


@pytest.mark.parametrize(("seconds", "behind"), [(0.59, False), (0.61, True)])
def test_a_limit_needs_no_peer(seconds: float, behind: bool) -> None:
    verdict = judged(document({"first_token": {OURS: seconds}}))["first_token"]
    assert verdict.behind is behind
    assert verdict.text().endswith(f"{seconds:.2f} s; the bar is 0.60 s")


@pytest.mark.parametrize(("tokens", "behind"), [(7.9, True), (8.1, False)])
def test_weights_that_no_cache_holds_are_read_at_the_rate_of_memory(
    tokens: float, behind: bool
) -> None:
    rate = {"this machine": STEP_BYTES * 10.0}
    speeds = {"decode_128": {OURS: tokens}, "memory_rate": rate}
    assert judged(document(speeds, step=STEP_BYTES))["memory_share"].behind is behind
    assert "memory_share" not in judged(document(speeds, step=STEP_BYTES - 1))
    assert "memory_share" not in judged(document(speeds))


def test_losses_are_judged_where_they_are_known() -> None:
    losses = {OURS: 0.003, "llama.cpp Q8_0": 0.004, "other int8": 0.002}
    found = document({}, losses=losses)
    assert judged(found)["kl"].rival == "other int8"
    assert judged(found)["kl"].behind
    assert "perplexity" not in judged(found)
    assert "perplexity" in judged(document({}, losses=losses, bits=4), 4)


def test_what_was_not_measured_is_not_judged() -> None:
    assert judged(document({})) == {}
    assert judged(document({"decode_128": {OURS: 100.0}})) == {}
    assert judged(document({"decode_128": {"other int8": 100.0}})) == {}


def test_cells_have_keys_of_their_own() -> None:
    for bits in (8, 4):
        keys = [bar.key for bar in BARS if bits in bar.widths]
        assert len(keys) == len(set(keys))


@given(st.floats(0.5, 2.0), st.floats(1.0, 1.5))
def test_what_is_told_is_never_the_bar_where_it_is_missed(value: float, least: float) -> None:
    verdict = judged(document({"decode_128": three(value, 1.0, 1.0)}))["decode_128"]
    verdict = replace(verdict, bar=replace(verdict.bar, least=round(least, 2)))
    told = float(verdict.text().split(" times as good")[0].rsplit(" ", 1)[1])
    assert abs(told - value) <= 0.01 + 1e-9
    assert verdict.behind == (value < verdict.bar.least)
    if verdict.behind:
        assert told < verdict.bar.least
