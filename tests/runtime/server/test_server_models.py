"""Several models behind one server: names, queues, and what one means for the others."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import ServerConfig

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]
NewLLM = Callable[[bool], tuple[AsyncLLM, Any]]

SECOND = ModelCard(("second", "deux"), 1_700_000_001, "fp-2")
LONG = {"max_tokens": 40, "ignore_eos": True}


def test_a_name_picks_its_model_and_none_the_first(run_lab: RunLab, new_llm: NewLLM) -> None:
    llm, session = new_llm(True)

    async def test(lab: Lab) -> None:
        lab.service.ready(llm, SECOND)
        listed = (await lab.get("/v1/models")).json()["data"]
        roots = [(m["id"], m["root"]) for m in listed]
        ours = [("fake", "fake"), ("alias/two", "fake")]
        assert roots == [*ours, ("second", "second"), ("deux", "second")]
        first = (await lab.complete(max_tokens=2)).json()
        assert (first["model"], session.entered.is_set()) == ("fake", False)
        other = (await lab.complete(max_tokens=2, model="deux")).json()
        assert (other["model"], session.entered.is_set()) == ("deux", True)
        assert other["system_fingerprint"] == "fp-2"
        assert (await lab.complete(model="third")).error["code"] == "model_not_found"
        assert [each.name for each in lab.service.engines] == ["fake", "second"]
        await llm.close()

    run_lab(test)


def test_a_full_queue_is_that_of_one_model(run_lab: RunLab, new_llm: NewLLM) -> None:
    llm, _ = new_llm(True)

    async def test(lab: Lab) -> None:
        lab.service.ready(llm, SECOND)
        body = {"prompt": "hello", **LONG}
        waiting = [lab.start("POST", "/v1/completions", body) for _ in range(4)]
        while lab.service.admission.sequences < 4:
            await asyncio.sleep(0.001)
        for name in ("fake", "alias/two"):
            refused = await lab.complete(model=name)
            assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert (await lab.complete(model="second", **LONG)).status == 200
        lab.session.permits.release(1_000)
        assert {(await each.whole()).status for each in waiting} == {200}
        assert lab.service.admission.empty.is_set()
        await llm.close()

    run_lab(test, ServerConfig(max_queue=1), is_open=False)


def test_the_end_of_any_engine_is_the_end_of_the_server(run_lab: RunLab, new_llm: NewLLM) -> None:
    llm, _ = new_llm(True)

    async def test(lab: Lab) -> None:
        lab.service.ready(llm, SECOND)
        assert (await lab.get("/health")).status == 200
        await llm.close()
        assert (await lab.get("/health")).json()["status"] == "dead"
        assert (await lab.complete()).error["code"] == "engine_dead"

    run_lab(test)


def test_a_name_has_one_model(run_lab: RunLab, new_llm: NewLLM) -> None:
    llm, _ = new_llm(True)

    async def test(lab: Lab) -> None:
        with pytest.raises(UsageError, match="'alias/two'"):
            lab.service.ready(llm, ModelCard(("new", "alias/two"), 0, "fp"))
        assert [each.name for each in lab.service.models] == ["fake", "alias/two"]
        await llm.close()

    run_lab(test)
