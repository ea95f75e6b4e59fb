"""A session with the settings that suit this machine: given, remembered, or measured now."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trtllm_lite.runtime.backends.base import Batch, Session, SessionOptions, Spin
from trtllm_lite.runtime.host import OthersMeter
from trtllm_lite.runtime.host_tuning import (
    Loop,
    Setting,
    Tuning,
    candidates,
    from_json,
    in_words,
    measure,
    to_json,
)

RECORD = "tuning"

OpenSession = Callable[[SessionOptions], Session]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Given:
    """What the caller decided. None leaves it to the machine."""

    threads: int | None = None
    spin: Spin | None = None
    huge_pages: bool | None = None

    @property
    def anything(self) -> bool:
        return self != Given()


@dataclass(frozen=True)
class Host:
    """What settings depend on. `cores`: threads by default. `backend`: its name and version.
    `room_for_copies`: memory holds private copies of the weights beside the shared ones."""

    cores: int
    backend: str
    room_for_copies: bool = True


def tuned_session(
    open_session: OpenSession, options: SessionOptions, given: Given, host: Host
) -> tuple[Session, Tuning]:
    """Open a session, and say which settings it got.

    Settings are measured once, at a time when the machine is not busy with other work, and
    remembered in the host cache. Without a cache, or where the caller has given some of them, the
    others are the default or what is remembered. Raises what `open_session` raises.
    """
    cores, backend = host.cores, host.backend
    cache = options.host_cache
    known = from_json(cache.recall(RECORD), cores, backend) if cache is not None else None
    if known is None and cache is not None and not given.anything:
        known = measure(
            candidates(cores, private_copies=host.room_for_copies),
            lambda setting: _DecodeLoop(open_session, options, setting),
            others=OthersMeter().fraction,
        )
        if known.origin == "measured":
            cache.remember(RECORD, to_json(known, cores, backend))
    tuning = _with_given(known or Tuning(Setting(cores)), given)
    session = open_session(_with_setting(options, tuning.setting))
    _log.info("%s", describe(tuning, session))
    return session, tuning


def describe(tuning: Tuning, session: Session) -> str:
    """One line: the settings, where they come from, where the weights lie."""
    info = session.info
    huge = info.huge_page_bytes // 2**20
    weights = f"{info.weights} weights" + (f", {huge} MiB in huge pages" if huge else "")
    cache = f"{info.kv_dtype} KV cache"
    return f"{in_words(tuning)}, {info.kernels} kernels, {cache}, {weights}"


def _with_given(tuning: Tuning, given: Given) -> Tuning:
    setting = tuning.setting
    setting = Setting(
        threads=setting.threads if given.threads is None else given.threads,
        spin=setting.spin if given.spin is None else given.spin,
        huge_pages=setting.huge_pages if given.huge_pages is None else given.huge_pages,
    )
    return replace(tuning, setting=setting)


def _with_setting(options: SessionOptions, setting: Setting) -> SessionOptions:
    return replace(
        options,
        intra_op_num_threads=setting.threads,
        spin=setting.spin,
        huge_pages=setting.huge_pages,
    )


class _DecodeLoop(Loop):
    """Decodes a sequence of one row, which begins again when its slot is full."""

    def __init__(self, open_session: OpenSession, options: SessionOptions, setting: Setting):
        alone = replace(options, num_slots=1, phases=("decode",))
        self._session = open_session(_with_setting(alone, setting))
        self._capacity = options.capacity
        self._past = 0

    def step(self) -> None:
        past, one = np.full(1, self._past, np.int32), np.ones(1, np.int32)
        token = np.zeros((1, 1), np.int64)
        self._session.run(Batch("decode", 0, token, past, one, past + one, token))
        self._past = (self._past + 1) % self._capacity

    def close(self) -> None:
        self._session.close()
