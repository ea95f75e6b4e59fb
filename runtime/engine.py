"""The loop that serves requests: plan, run, sample, apply."""

import logging
import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

from trtllm_lite.runtime.backends.base import Batch, Session
from trtllm_lite.runtime.batch import build_batches
from trtllm_lite.runtime.block_store import BlockStore
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import (
    EngineDeadError,
    RequestError,
    RunInterruptedError,
    UsageError,
)
from trtllm_lite.runtime.invariants import violations
from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.native_table import FEW_TOKENS
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.placement import Placement
from trtllm_lite.runtime.plan import Applied, Outcome, PlanRow, StepPlan
from trtllm_lite.runtime.prefix_cache import PrefixCache
from trtllm_lite.runtime.request import FinishReason, Request, Sequence
from trtllm_lite.runtime.request_checks import check_request, max_length
from trtllm_lite.runtime.row_sampler import RowSampler, one_line
from trtllm_lite.runtime.scheduler import Scheduler
from trtllm_lite.runtime.speculation import ONE_TOKEN_DECODE, Speculator
from trtllm_lite.runtime.step_timer import NullTimer, StepTimer
from trtllm_lite.runtime.transfers import Transfer, execute
from trtllm_lite.runtime.unwanted import Unwanted

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """One look at the engine. Now: sequences in `waiting` and `running`, tokens in `kv_tokens_*`,
    what the block store holds in `prefix_store_*`. So far: `prompt_tokens` of requests that got a
    slot; `generation_tokens` made; `prefix_query_tokens` looked up in the block store and
    `prefix_hit_tokens` taken from it; `draft_tokens` guessed and checked, `accepted_tokens` of them
    right; `finished` counts sequences."""

    waiting: int
    running: int
    slots_used: int
    slots_total: int
    kv_tokens_used: int
    kv_tokens_total: int
    prompt_tokens: int
    generation_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_store_blocks: int
    prefix_store_bytes: int
    preemptions: int
    steps: int
    draft_tokens: int
    accepted_tokens: int
    finished: Mapping[FinishReason, int]


class Engine:
    """Serves requests from one session, which it closes. Not thread-safe.

    `recompute_at`: see KVSpec. Token events come out of `step`, each sequence ending with exactly
    one event that has a `finish_reason`, unless it was ended by `stop`.
    """

    def __init__(
        self,
        session: Session,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        recompute_at: int | None = None,
    ) -> None:
        self._session = session
        self._config = config
        self._vocab_size = vocab_size
        self._store = BlockStore(config.store_bytes)
        self._kv = KVCache(config.max_num_seqs)
        prefix = PrefixCache(
            self._store,
            block_size=config.block_size,
            block_bytes=config.block_size * session.info.kv_bytes_per_token,
            recompute_at=recompute_at,
        )
        self._prefix = prefix
        placement = Placement(self._kv, prefix, recompute_at)
        self._speculator: Speculator | None = None
        if session.info.multi_token_decode:
            self._speculator = Speculator(
                config,
                eos_token_ids=eos_token_ids,
                recompute_at=recompute_at,
                cost=session.info.decode_cost,
            )
        elif config.speculation != "off":
            raise UsageError(f"speculation: got {config.speculation!r}; {ONE_TOKEN_DECODE}")
        self._scheduler = Scheduler(
            config,
            placement,
            eos_token_ids=eos_token_ids,
            speculator=self._speculator,
            decoded_chunk=FEW_TOKENS if session.info.multi_token_decode else None,
        )
        self._sampler = RowSampler(vocab_size, eos_token_ids)
        self.timer: StepTimer = NullTimer()
        """Told where the time of each step goes. Whoever drives the engine calls its `end`."""
        self.unwanted = Unwanted(session.interrupt)
        """Told by any thread whose prompts need not be computed to their end."""
        self._active: dict[str, dict[int, Sequence]] = {}
        self._events: list[TokenEvent] = []
        self._steps = 0
        self._closed = False

    @property
    def device(self) -> str:
        """What the session computes on: "cpu" or the name of its device."""
        return self._session.info.device

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._active or self._events)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError or ContextLengthError for one that could never be
        served, EngineDeadError after `close`."""
        self._check_open()
        check_request(request, self._config, self._vocab_size)
        if request.params.speculation and self._speculator is None:
            raise RequestError("speculation", f"got True; {ONE_TOKEN_DECODE}")
        if request.id in self._active:
            raise RequestError("request_id", f"got {request.id!r}, which is in use; choose another")
        if request.params.seed is None:
            seed = secrets.randbits(63)
            request = replace(request, params=replace(request.params, seed=seed))
        self._active[request.id] = {}
        for index in range(request.params.n):
            tokens = list(request.prompt_token_ids)
            sequence = Sequence(request, index, tokens, max_length(request, self._config))
            self._active[request.id][index] = sequence
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End all choices of a request and free their slots at once. Unknown ids are no error."""
        sequences = self._active.get(request_id, {}).values()
        applied = self._scheduler.finish(sequences, "abort")
        self._retire(applied.events)
        self._transfer(applied.transfers)
        return list(applied.events)

    def stop(self, request_id: str, index: int, stop_reason: str) -> None:
        """A stop string of this choice is complete: end it before the next plan. It gets no
        further event. Nothing happens when it has ended already."""
        sequence = self._active.get(request_id, {}).get(index)
        if sequence is not None:
            applied = self._scheduler.finish([sequence], "stop", stop_reason)
            self._retire(applied.events)
            self._transfer(applied.transfers)

    def step(self) -> list[TokenEvent]:
        """One step, and what came of it. A run that fails ends the sequences of that run with
        "error"; slot memory that cannot be arranged ends all that have a slot. Raises
        EngineDeadError when the session cannot run anything any more."""
        self._check_open()
        self.timer.begin()
        try:
            plan = self._scheduler.plan()
            self.timer.planned(plan)
            self.timer.mark("plan")
            if self._transfer(plan.transfers):
                self.timer.mark("memory")
                self._apply(self._scheduler.apply(plan, self._run(plan)))
        except BaseException as error:
            # Slots may be half-way, so nothing of them may be read or kept.
            self._fail_started(f"the step was interrupted: {one_line(error)}")
            raise
        self._steps += 1
        self._check_books()
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            slots_used=self._kv.num_slots - self._kv.num_free,
            slots_total=self._kv.num_slots,
            kv_tokens_used=scheduler.kv_tokens,
            kv_tokens_total=self._config.max_kv_tokens,
            prompt_tokens=scheduler.num_prompt_tokens,
            generation_tokens=scheduler.num_generated_tokens,
            prefix_query_tokens=self._prefix.query_tokens,
            prefix_hit_tokens=self._prefix.hit_tokens,
            prefix_store_blocks=len(self._store),
            prefix_store_bytes=self._store.nbytes,
            preemptions=scheduler.num_preemptions,
            steps=self._steps,
            draft_tokens=scheduler.num_draft_tokens,
            accepted_tokens=scheduler.num_accepted_tokens,
            finished=dict(scheduler.finished),
        )

    def close(self) -> None:
        """Close the session and drop everything, unfinished requests too. Idempotent."""
        self._closed = True
        self._active.clear()
        self._events.clear()
        self._store.clear()
        self._session.close()

    def _run(self, plan: StepPlan) -> dict[Sequence, Outcome]:
        outcomes: dict[Sequence, Outcome] = {}
        batches = build_batches(plan)
        self.timer.mark("batch")
        for batch in batches:
            outcomes |= self._run_batch(batch, plan.rows_of(batch))
        return outcomes

    def _run_batch(self, batch: Batch, rows: Ordered[PlanRow]) -> dict[Sequence, Outcome]:
        ids = frozenset(row.sequence.request.id for row in rows if batch.phase == "prefill")
        if self.unwanted.covers(ids):
            return {row.sequence: Outcome(given_up=True) for row in rows}
        if self._session.info.top_logits:
            batch = replace(batch, candidates=self._sampler.candidates(rows))
        try:
            with self.unwanted.running(ids):
                logits = self._session.run(batch)
        except RunInterruptedError:
            # Given up now, or else meant for a run before this one: the same is computed again.
            return self._run_batch(batch, rows)
        except EngineDeadError:
            raise
        except Exception as error:
            _warn(f"a {batch.phase} run of {batch.rows} rows failed", error)
            return {row.sequence: Outcome(error=one_line(error)) for row in rows}
        finally:
            self.timer.mark("run")
        # The logits are only valid until the next run.
        outcomes = self._sampler.take_all(rows, logits)
        self.timer.mark("sample")
        return outcomes

    def _apply(self, applied: Applied) -> None:
        self._events += applied.events
        self._retire(applied.events)
        self.timer.mark("apply")
        self._transfer(applied.transfers)
        self.timer.mark("memory")

    def _transfer(self, transfers: tuple[Transfer, ...]) -> bool:
        """Arrange slot memory. False when that failed, and with it everything that has a slot."""
        if not transfers:
            return True
        try:
            execute(transfers, self._session, self._store)
        except EngineDeadError:
            raise
        except Exception as error:
            _warn("slot memory could not be arranged", error)
            self._fail_started(one_line(error))
            return False
        return True

    def _fail_started(self, error: str) -> None:
        """End every sequence that has left the queue. Those still in it are untouched."""
        waiting = set(self._scheduler.waiting)
        active = [s for choices in self._active.values() for s in choices.values()]
        applied = self._scheduler.fail([s for s in active if s not in waiting], error)
        self._events += applied.events
        self._retire(applied.events)
        execute(applied.transfers, self._session, self._store)

    def _retire(self, events: Iterable[TokenEvent]) -> None:
        """Forget the sequences that end with these events."""
        for event in events:
            if event.finish_reason is not None:
                choices = self._active[event.request_id]
                self._sampler.forget(choices.pop(event.index))
                if not choices:
                    del self._active[event.request_id]

    def _check_books(self) -> None:
        if self._config.check_invariants:
            found = violations(self._kv, self._scheduler, self._store, self._config)
            if found:
                raise RuntimeError("the engine's books are wrong: " + "; ".join(found))

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine is closed; open a new one")


def _warn(what: str, error: Exception) -> None:
    """One line for the log; where it failed, for those who debug."""
    _log.warning("%s: %s", what, one_line(error), exc_info=_log.isEnabledFor(logging.DEBUG))
