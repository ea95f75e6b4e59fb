"""Who decides the settings of a session: the caller, the record, the self-test, the default."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_lite.runtime import session_tuning
from trtllm_lite.runtime.backends.base import Batch, Session, SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.host import OthersMeter
from trtllm_lite.runtime.host_cache import HostCache, host_cache
from trtllm_lite.runtime.host_tuning import Setting, Tuning
from trtllm_lite.runtime.session_tuning import Given, Host, describe, tuned_session


class Opener:
    """Opens fake sessions and keeps what they were opened with."""

    def __init__(self) -> None:
        self.options: list[SessionOptions] = []
        self.sessions: list[FakeSession] = []

    def __call__(self, options: SessionOptions) -> Session:
        self.options.append(options)
        self.sessions.append(FakeSession(options))
        return self.sessions[-1]

    @property
    def last(self) -> SessionOptions:
        return self.options[-1]


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else runs on the machine."""
    monkeypatch.setattr(OthersMeter, "fraction", lambda self: 0.0)


@pytest.fixture
def picks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tuning], list[int]]:
    """Puts a result in place of the measurement; the list grows with each of them."""

    def put(tuning: Tuning) -> list[int]:
        calls: list[int] = []

        def measured(*_: object, **__: object) -> Tuning:
            calls.append(1)
            return tuning

        monkeypatch.setattr(session_tuning, "measure", measured)
        return calls

    return put


@pytest.fixture
def cache(plain_bundle: Path) -> HostCache:
    return host_cache(plain_bundle)


Picks = Callable[[Tuning], list[int]]
OPTIONS = SessionOptions(num_slots=4, capacity=32)
HOST = Host(4, "cpu 1")
PICKED = Tuning(Setting(3, "off", huge_pages=True), "measured")


def settings_of(options: SessionOptions) -> tuple[object, ...]:
    return options.intra_op_num_threads, options.spin, options.huge_pages


def test_what_was_measured_is_used_and_remembered(cache: HostCache, picks: Picks) -> None:
    calls, opener = picks(PICKED), Opener()
    options = replace(OPTIONS, host_cache=cache)
    _, first = tuned_session(opener, options, Given(), HOST)
    _, second = tuned_session(opener, options, Given(), HOST)
    assert (first, second.setting, second.origin) == (PICKED, PICKED.setting, "remembered")
    assert [settings_of(o) for o in opener.options] == [(3, "off", True)] * 2
    assert opener.last.num_slots == 4
    tuned_session(opener, options, Given(), replace(HOST, backend="cpu 2"))
    assert len(calls) == 2


def test_a_busy_machine_is_asked_again(cache: HostCache, picks: Picks) -> None:
    calls, opener = picks(Tuning(Setting(4), "busy")), Opener()
    for _ in range(2):
        _, tuning = tuned_session(opener, replace(OPTIONS, host_cache=cache), Given(), HOST)
        assert (tuning.setting, tuning.origin) == (Setting(4), "busy")
    assert len(calls) == 2


def test_without_a_cache_nothing_is_measured(picks: Picks) -> None:
    calls, opener = picks(PICKED), Opener()
    _, tuning = tuned_session(opener, OPTIONS, Given(), HOST)
    assert tuning == Tuning(Setting(4), "default")
    assert settings_of(opener.last) == (4, "brief", None)
    assert not calls


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Given(threads=2), (2, "off", True)),
        (Given(spin="long"), (3, "long", True)),
        (Given(huge_pages=False), (3, "off", False)),
        (Given(1, "brief", False), (1, "brief", False)),
    ],
)
def test_what_is_given_wins_over_what_is_remembered(
    cache: HostCache, picks: Picks, given: Given, expected: tuple[object, ...]
) -> None:
    calls, opener = picks(PICKED), Opener()
    options = replace(OPTIONS, host_cache=cache)
    tuned_session(opener, options, Given(), HOST)
    _, tuning = tuned_session(opener, options, given, HOST)
    assert settings_of(opener.last) == expected
    assert tuning.setting == Setting(*expected)  # type: ignore[arg-type]  # of mixed types
    assert len(calls) == 1


def test_given_settings_are_never_measured_beside(cache: HostCache, picks: Picks) -> None:
    calls, opener = picks(PICKED), Opener()
    _, tuning = tuned_session(opener, replace(OPTIONS, host_cache=cache), Given(threads=2), HOST)
    assert (tuning.setting, tuning.origin, calls) == (Setting(2), "default", [])


@pytest.mark.usefixtures("calm")
def test_the_loop_decodes_one_row_and_every_session_but_the_last_is_closed(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Batch] = []
    run = FakeSession.run

    def kept(self: FakeSession, batch: Batch) -> object:
        batches.append(batch)
        return run(self, batch)

    monkeypatch.setattr(FakeSession, "run", kept)
    opener = Opener()
    session, tuning = tuned_session(
        opener, replace(OPTIONS, host_cache=cache), Given(), replace(HOST, cores=2)
    )
    assert tuning.origin == "measured"
    assert {o.phases for o in opener.options[:-1]} == {("decode",)}
    assert {o.num_slots for o in opener.options[:-1]} == {1}
    assert opener.last.phases == ("prefill", "decode")
    assert {(b.phase, b.rows, int(b.past_lens[0])) for b in batches} == {
        ("decode", 1, n) for n in range(25)
    }
    assert opener.sessions[-1] is session
    for closed in opener.sessions[:-1]:
        with pytest.raises(Exception, match="closed"):
            closed.release(0)
    session.release(0)


def test_one_line_says_what_was_picked() -> None:
    class Told(FakeSession):
        @property
        def info(self) -> SessionInfo:
            return replace(super().info, weights="private", huge_page_bytes=300 * 2**20)

    line = describe(PICKED, Told(OPTIONS))
    assert line.startswith("3 threads, spinning off (measured), onnxruntime kernels, ")
    assert line.endswith("private weights, 300 MiB in huge pages")
    line = describe(Tuning(Setting(1), "remembered"), FakeSession(OPTIONS))
    picked = "1 thread, spinning brief (remembered), onnxruntime kernels"
    assert line == f"{picked}, float32 KV cache, private weights"
