"""/metrics: what it tells, that reading it changes nothing, and that the books are right."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from trtllm_lite import __version__
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import ServerConfig

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

BOARD = Path(__file__).parents[3] / "docs/grafana/trtllm-lite.json"
CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50, "ignore_eos": True}
GATE = {"name": "kl", "passed": True, "value": 0.25, "limit": 0.5, "meaning": "m"}
FACTS = {
    "source": "org/model",
    "model_type": "llama",
    "quantization": {"prefill": "none", "decode": "int8"},
    "parity": {"passed": True, "gates": [GATE, {"name": 5}, "nonsense"]},
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def families(lab: Lab) -> dict[str, Metric]:
    text = (await lab.get("/metrics")).body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


async def samples(lab: Lab) -> Samples:
    """Every number by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in (await families(lab)).values()
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum over those that have these labels."""
    wanted = set(labels.items())
    keys = [key for key in found if key[0] == f"trtllm_lite_{name}" and wanted <= set(key[1])]
    return sum(found[key] for key in keys)


def check_books(found: Samples) -> None:
    """Accepted requests have ended in one way, or are in flight."""
    outcomes = ("finished", "aborted", "failed")
    ended = sum(total(found, f"requests_{name}_total") for name in outcomes)
    in_flight = total(found, "requests_in_flight")
    assert total(found, "requests_accepted_total") == ended + in_flight
    assert in_flight >= 0


def test_one_request_is_told_in_full(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        await lab.chat("hello", max_tokens=6, ignore_eos=True)
        await lab.idle()
        found = await samples(lab)
        model = {"model_name": "fake"}
        counts = {
            "requests_accepted_total": 1,
            "requests_finished_total": 1,
            "requests_in_flight": 0,
            "prompt_tokens_total": 5,
            "generation_tokens_total": 6,
            "request_prompt_tokens_sum": 5,
            "request_generation_tokens_sum": 6,
            "kv_slots_total": 3,
            "prefix_query_tokens_total": 5,
            "steps_total": 6,
        }
        assert {name: total(found, name, **model) for name in counts} == counts
        assert total(found, "choices_finished_total", reason="length", **model) == 1
        phases = {p: total(found, "step_seconds_count", phase=p) for p in ("prefill", "decode")}
        assert phases == {"prefill": 1, "decode": 5}
        assert total(found, "inter_token_latency_seconds_count", **model) == 5
        for name in (
            *("time_to_first_token", "request_queue_time", "request_time_per_output_token"),
            *("e2e_request_latency", "request_inference_time", "request_prefill_time"),
            "request_decode_time",
        ):
            assert total(found, f"{name}_seconds_count", **model) == 1
        assert total(found, "queue_limit") == 7
        check_books(found)

    run_lab(test, ServerConfig(max_queue=7))


def test_times_add_up(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        await asyncio.gather(*(lab.chat("hello", max_tokens=9, ignore_eos=True) for _ in range(5)))
        await lab.idle()
        found = await samples(lab)
        seconds = {
            name: total(found, f"{name}_seconds_sum")
            for name in (
                *("request_queue_time", "request_prefill_time", "request_decode_time"),
                *("request_inference_time", "e2e_request_latency", "time_to_first_token"),
            )
        }
        prefill, decode = seconds["request_prefill_time"], seconds["request_decode_time"]
        assert prefill + decode == pytest.approx(seconds["request_inference_time"])
        queue = seconds["request_queue_time"]
        assert queue + prefill == pytest.approx(seconds["time_to_first_token"])
        assert queue + prefill + decode == pytest.approx(seconds["e2e_request_latency"])

    run_lab(test)


def test_a_busy_engine_does_not_hold_up_the_numbers(
    run_lab: RunLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, LONG)
        while not lab.session.entered.is_set():
            await asyncio.sleep(0.001)

        async def asked() -> None:
            raise AssertionError("the engine was asked")

        with monkeypatch.context() as patched:
            patched.setattr(lab.llm, "stats", asked)
            while total(found := await samples(lab), "requests_in_flight") < 1:
                await asyncio.sleep(0.001)
            assert total(found, "requests_waiting") + total(found, "requests_running") == 1
            check_books(found)
        lab.session.permits.release(1000)
        await live.whole()

    run_lab(test, is_open=False)


def test_tokens_are_counted_as_they_are_made(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", CHAT, {**LONG, "stream": True})
        lab.session.permits.release(4)
        while total(await samples(lab), "generation_tokens_total") < 4:
            await asyncio.sleep(0.001)
        while total(await samples(lab), "time_to_first_token_seconds_count") < 1:
            await asyncio.sleep(0.001)
        found = await samples(lab)
        assert total(found, "prompt_tokens_total") == 5
        assert total(found, "e2e_request_latency_seconds_count") == 0
        live.leave()
        await live.task
        lab.session.permits.release(1000)
        await lab.idle()
        found = await samples(lab)
        assert total(found, "requests_aborted_total") == 1
        assert total(found, "choices_finished_total", reason="abort") == 1
        assert total(found, "generation_tokens_total") >= 4
        check_books(found)

    run_lab(test, is_open=False)


def test_the_bundle_and_its_certificate_are_told(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        found = await samples(lab)
        model = {"model_name": "org/m"}
        assert total(found, "build_info", version=__version__) == 1
        facts = {"source": "org/model", "decode_format": "int8", "dtype": ""}
        assert total(found, "model_info", fingerprint="fp", **facts, **model) == 1
        assert total(found, "parity_passed", **model) == 1
        assert total(found, "parity_gate_value", gate="kl", **model) == 0.25
        assert total(found, "parity_gate_limit", gate="kl", **model) == 0.5
        assert sum(1 for name, _ in found if name == "trtllm_lite_parity_gate_value") == 1

    run_lab(test, card=ModelCard(("org/m", "alias"), 0, "fp", FACTS))


@pytest.mark.parametrize("facts", [{}, {"parity": None}, {"parity": "x", "quantization": 5}])
def test_a_bundle_without_a_certificate_claims_nothing(
    run_lab: RunLab, facts: dict[str, Any]
) -> None:
    async def test(lab: Lab) -> None:
        names = {name for name, _ in await samples(lab)}
        assert "trtllm_lite_model_info" in names
        assert not [name for name in names if "parity" in name]

    run_lab(test, card=ModelCard(("m",), 0, "fp", facts))


def test_requests_under_an_alias_count_for_the_model(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        await lab.chat(model="alias/two", max_tokens=1)
        found = await samples(lab)
        assert total(found, "requests_finished_total", model_name="fake") == 1
        assert total(found, "requests_finished_total") == 1

    run_lab(test)


def test_vllms_names_have_the_same_numbers(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        await lab.chat("hello", max_tokens=6, ignore_eos=True, temperature=0.5)
        await lab.chat(temperature=-1)
        await lab.idle()
        found = await samples(lab)
        model = (("model_name", "fake"),)
        reason = (("finished_reason", "length"), *model)
        pairs = {
            ("vllm:num_requests_running", model): "requests_running",
            ("vllm:num_requests_waiting", model): "requests_waiting",
            ("vllm:kv_cache_usage_perc", model): "kv_cache_usage_ratio",
            ("vllm:prompt_tokens_total", model): "prompt_tokens_total",
            ("vllm:generation_tokens_total", model): "generation_tokens_total",
            ("vllm:prefix_cache_queries_total", model): "prefix_query_tokens_total",
            ("vllm:prefix_cache_hits_total", model): "prefix_hit_tokens_total",
            ("vllm:num_preemptions_total", model): "preemptions_total",
            ("vllm:request_success_total", reason): "choices_finished_total",
            ("vllm:admission_rejections_total", (("reason", "invalid"),)): (
                "requests_rejected_total"
            ),
        }
        for name in (
            *("time_to_first_token", "inter_token_latency", "e2e_request_latency"),
            *("request_queue_time", "request_time_per_output_token"),
        ):
            for part in ("sum", "count"):
                pairs[f"vllm:{name}_seconds_{part}", model] = f"{name}_seconds_{part}"
            buckets = (("le", "+Inf"), *model)
            pairs[f"vllm:{name}_seconds_bucket", buckets] = f"{name}_seconds_count"
        for theirs, ours in pairs.items():
            assert found[theirs] == total(found, ours), theirs
        assert total(found, "generation_tokens_total") == 6

    run_lab(test, ServerConfig(metrics_alias="vllm"))


def test_other_names_are_there_only_when_asked_for(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        await lab.chat(max_tokens=1)
        names = {name for name, _ in await samples(lab)}
        assert all(name.startswith("trtllm_lite_") for name in names)

    run_lab(test)


def test_numbers_before_a_model_is_there(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        first, second = await lab.get("/metrics"), await lab.get("/metrics")
        assert (first.status, first.body) == (200, second.body)
        assert (await lab.chat()).status == 503
        assert total(await samples(lab), "requests_rejected_total", reason="loading") == 1

    run_lab(test, loaded=False)


@pytest.mark.parametrize("seed", range(3))
def test_the_books_are_right_at_any_time(run_lab: RunLab, seed: int) -> None:
    """Requests come, end, fail and leave in random order; every look adds up."""
    chance = random.Random(seed)

    async def test(lab: Lab) -> None:
        lives: list[Any] = []
        for _ in range(40):
            choice = chance.random()
            if choice < 0.5:
                fields = {"stream": chance.random() < 0.5, "n": chance.randint(1, 2)}
                body = {**LONG, **fields, "max_tokens": chance.randint(1, 9)}
                lives.append(lab.start("POST", CHAT, {**body, "temperature": 0.9}))
            elif choice < 0.6:
                lives.append(lab.start("POST", CHAT, {**LONG, "top_p": 7}))
            elif choice < 0.75 and lives:
                chance.choice(lives).leave()
            elif choice < 0.8:
                lab.session.fail_next(1)
            else:
                lab.session.permits.release(chance.randint(1, 6))
                await asyncio.sleep(0.001)
            check_books(await samples(lab))
        lab.session.permits.release(10_000)
        await asyncio.gather(*(live.task for live in lives))
        await lab.idle()
        found = await samples(lab)
        check_books(found)
        assert total(found, "requests_in_flight") == 0
        assert total(found, "requests_accepted_total") > 0
        ended = total(found, "choices_finished_total")
        assert ended >= total(found, "requests_accepted_total")

    run_lab(test, ServerConfig(max_queue=8), is_open=False)


def test_the_board_asks_for_numbers_that_are_there(run_lab: RunLab) -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    assert len(board["panels"]) > 10
    asked = set[str]()
    for panel in board["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = re.findall(r"trtllm_lite_\w+", target["expr"])
            assert names, target["expr"]
            asked |= set(names)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])

    async def test(lab: Lab) -> None:
        await lab.chat(max_tokens=3)
        await lab.chat(temperature=-1)
        await lab.idle()
        names = {name for name, _ in await samples(lab)}
        assert asked <= names, sorted(asked - names)

    card = replace(ModelCard(("m",), 0, "fp"), facts=FACTS)
    run_lab(test, card=card)
