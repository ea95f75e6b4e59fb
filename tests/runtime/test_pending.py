"""Answers from another thread: waited for, awaited, and not missed."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from trtllm_lite.runtime.pending import Pending


def later(action: Callable[[], None]) -> None:
    threading.Timer(0.01, action).start()


def test_an_answer_may_come_before_or_after_the_question() -> None:
    early: Pending[int] = Pending()
    early.set(3)
    assert early.result() == 3
    late: Pending[int] = Pending()
    later(lambda: late.set(4))
    assert late.result() == 4
    assert late.result() == 4


def test_an_error_is_raised_where_it_is_read() -> None:
    pending: Pending[int] = Pending()
    later(lambda: pending.fail(KeyError("gone")))
    with pytest.raises(KeyError, match="gone"):
        pending.result()


def test_answers_can_be_awaited() -> None:
    async def main() -> None:
        early: Pending[str] = Pending()
        early.set("now")
        assert await early == "now"
        late: Pending[str] = Pending()
        later(lambda: late.set("then"))
        assert await late == "then"
        bad: Pending[str] = Pending()
        later(lambda: bad.fail(ValueError("no")))
        with pytest.raises(ValueError, match="no"):
            await bad

    asyncio.run(main())


def test_none_is_an_answer() -> None:
    pending: Pending[None] = Pending()
    later(lambda: pending.set(None))
    pending.result()


def test_answering_a_loop_that_is_gone_is_no_error() -> None:
    pending: Pending[int] = Pending()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pending, 0.001)

    asyncio.run(give_up())
    pending.set(1)
    assert pending.result() == 1
