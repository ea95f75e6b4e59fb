"""Which sequences run in a step and how many tokens each; what becomes of them after it."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.placement import Placement
from trtllm_lite.runtime.plan import Applied, Outcome, PlanRow, PromptLogprobs, StepPlan
from trtllm_lite.runtime.request import FinishReason, Sequence, Status
from trtllm_lite.runtime.sampler import Sampled
from trtllm_lite.runtime.speculation import Speculator

MIN_CHUNK = 16
TAIL_SHARE = 16
MAX_PROMPT_LOGPROBS_CHUNK = 64


class Scheduler:
    """Owns `waiting` and `running`, both oldest first, and alone writes to sequences, in part
    through its `Placement`.

    Every running sequence is older than every waiting one: admission is first come, first served,
    and what has to give way is the youngest, which goes back to the front of the queue. So the
    oldest always proceeds, and none starves. `speculator` None: every decode row is one token.
    `decoded_chunk`: what was decoded is computed again on the decode graph, at most so many tokens
    at a time, so that giving way changes nothing; None: on the prefill graph, like a prompt.
    """

    def __init__(
        self,
        config: EngineConfig,
        placement: Placement,
        *,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float] = time.monotonic,
        speculator: Speculator | None = None,
        decoded_chunk: int | None = None,
    ) -> None:
        self._config = config
        self._placement = placement
        self._kv = placement.kv
        self._eos = frozenset(eos_token_ids)
        self._clock = clock
        self._speculator = speculator
        self._decoded_chunk = decoded_chunk
        all_slots = config.max_num_seqs * config.max_sequence_tokens
        self._tail = min(MIN_CHUNK, config.max_num_batched_tokens // TAIL_SHARE)
        self._crowds = all_slots > config.max_kv_tokens
        """Whether running sequences can grow past the limit of tokens at all."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.finished: Counter[FinishReason] = Counter()
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens of all running sequences."""
        return sum(len(s.token_ids) for s in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. It must fit alone, or it would block the queue for ever."""
        self.waiting.append(sequence)

    def plan(self) -> StepPlan:
        """Choose the next step: every decoding row, then prefill with what is left of the budget.

        When decoding rows use up the budget, prefill still gets MIN_CHUNK tokens. A run has a price
        of its own, about that of ten tokens. So the last tokens of a prompt, up to MIN_CHUNK and
        the budget's TAIL_SHARE-th part of them, go with the ones before them, past the budget.
        """
        drafts = self._drafts()
        room = self._config.max_num_batched_tokens - self._kv.num_decoding
        if drafts:
            room -= sum(map(len, drafts.values()))
        chunks = self._share(max(room, min(MIN_CHUNK, self._config.max_num_batched_tokens)))
        decode = [self._row(s, 1, drafts.get(s, ())) for s in self._kv.decoding]
        prefill = [self._row(s, n) for s, n in chunks.items()] if chunks else ()
        return StepPlan(self._placement.drain(), tuple(decode), tuple(prefill))

    def apply(self, plan: StepPlan, outcomes: Mapping[Sequence, Outcome]) -> Applied:
        """Advance the rows of the plan, end what is done, preempt what no longer fits."""
        events: list[TokenEvent] = []
        rows = [row for row in plan.rows if not outcomes[row.sequence].given_up]
        for row in rows:
            events += self._advance(row, outcomes[row.sequence])
        ended = [r.sequence for r in rows if r.sequence.status is Status.FINISHED]
        if ended:
            self._leave(ended)
        for row in rows:
            if row.sequence.status is Status.RUNNING:
                self._placement.settle(row.sequence, sampled=row.samples)
        while self._crowds and self.kv_tokens > self._config.max_kv_tokens:
            self._preempt_youngest()
        return Applied(tuple(events), self._placement.drain())

    def finish(
        self, sequences: Iterable[Sequence], reason: FinishReason, stop_reason: str | None = None
    ) -> Applied:
        """End sequences between steps, those that have not ended yet. Events carry no token."""
        ended = [s for s in sequences if s.status is not Status.FINISHED]
        for sequence in ended:
            self._end(sequence, reason, stop_reason)
        self._leave(ended)
        return Applied(tuple(_event(s) for s in ended), self._placement.drain())

    def fail(self, sequences: Iterable[Sequence], error: str) -> Applied:
        """End `sequences`, all that have left the queue, and keep nothing of them: what their
        slots hold cannot be trusted. Those that have ended already get their last event too."""
        lost = list(sequences)
        for sequence in lost:
            if sequence.status is not Status.FINISHED:
                self._end(sequence, "error", error=error)
        self.running.clear()
        self._placement.clear()
        return Applied(tuple(_event(s) for s in lost), self._placement.drain())

    def _share(self, budget: int) -> dict[Sequence, int]:
        """Tokens of prefill for each sequence: running ones first, then as many more as can be
        admitted while the budget lasts."""
        chunks: dict[Sequence, int] = {}
        prefilling = len(self.running) > self._kv.num_decoding
        for sequence in self.running if prefilling else ():
            if budget > 0 and not self._kv.is_decoding(sequence):
                chunks[sequence] = self._chunk(sequence, budget)
                budget -= chunks[sequence]
        while budget > 0 and self._can_admit():
            sequence = self._admit()
            cost = self._chunk(sequence, budget)
            if not self._kv.is_decoding(sequence):
                chunks[sequence] = cost
            budget -= cost
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of it come next. Slots have room for the padding of a whole budget, so
        no chunk is larger than that."""
        left = sequence.num_uncomputed_tokens
        most = self._config.max_num_batched_tokens
        if self._decoded_chunk is not None and sequence.num_generated_tokens:
            prompt = sequence.num_prompt_tokens - sequence.num_computed_tokens
            left = min(left, prompt if prompt > 0 else self._decoded_chunk)
        if _wants_all_logits(sequence):
            most = min(most, MAX_PROMPT_LOGPROBS_CHUNK)
        return left if left <= min(budget + self._tail, most) else min(budget, most)

    def _can_admit(self) -> bool:
        """Whether the head of the queue may start. It must leave every running sequence room for
        one more token, or one would be preempted at once; alone it always fits."""
        if not self.waiting or self._kv.num_free == 0:
            return False
        head = self.waiting[0]
        needed = self.kv_tokens + len(head.token_ids) + len(self.running) + 1
        if needed > self._config.max_kv_tokens:
            return False
        return not self._awaits_sibling(head)

    def _awaits_sibling(self, head: Sequence) -> bool:
        """Whether the first choice of the same prompt is still in prefill: its blocks are worth a
        wait."""
        first = (s for s in self.running if s.request is head.request and s.index == 0)
        return self._placement.prefix.enabled and any(not s.num_generated_tokens for s in first)

    def _admit(self) -> Sequence:
        sequence = self.waiting.popleft()
        sequence.status = Status.RUNNING
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = self._clock()
            if sequence.index == 0:
                self.num_prompt_tokens += len(sequence.request.prompt_token_ids)
        self.running.append(sequence)
        self._placement.admit(sequence, reuse=not _wants_all_logits(sequence))
        return sequence

    def _drafts(self) -> Mapping[Sequence, tuple[int, ...]]:
        return {} if self._speculator is None else self._speculator.drafts(self._kv.decoding)

    def _row(self, sequence: Sequence, num_tokens: int, draft: tuple[int, ...] = ()) -> PlanRow:
        return PlanRow(
            sequence=sequence,
            slot=self._kv.slot_of(sequence),
            start=sequence.num_computed_tokens,
            num_tokens=num_tokens + len(draft),
            context_len=len(sequence.token_ids) + len(draft),
            all_logits=_wants_all_logits(sequence),
            draft=draft,
            decoded=self._computes_again(sequence),
        )

    def _computes_again(self, sequence: Sequence) -> bool:
        behind = sequence.num_computed_tokens >= sequence.num_prompt_tokens
        return behind and self._decoded_chunk is not None and not sequence.is_decoding

    def _advance(self, row: PlanRow, outcome: Outcome) -> list[TokenEvent]:
        sequence = row.sequence
        events: list[TokenEvent] = []
        accepted = len(outcome.sampled) - 1 if outcome.sampled else 0
        # What was computed behind a rejected token is not part of the sequence.
        sequence.num_computed_tokens += row.num_tokens - len(row.draft) + accepted
        if row.draft:
            self._learn(row, accepted)
        self.num_generated_tokens += len(outcome.sampled)
        for sampled in outcome.sampled:
            sequence.token_ids.append(sampled.token_id)
            self._end_if_done(sequence)
            events.append(_event(sequence, sampled, None if events else outcome.prompt_logprobs))
        if outcome.error is not None:
            self._end(sequence, "error", error=outcome.error)
            events.append(_event(sequence))
        return events

    def _learn(self, row: PlanRow, accepted: int) -> None:
        row.sequence.num_draft_tokens += len(row.draft)
        row.sequence.num_accepted_tokens += accepted
        self.num_draft_tokens += len(row.draft)
        self.num_accepted_tokens += accepted
        if self._speculator is not None:
            self._speculator.learn(row.sequence, len(row.draft), accepted)

    def _end_if_done(self, sequence: Sequence) -> None:
        token, params = sequence.token_ids[-1], sequence.request.params
        if token in self._eos and not params.ignore_eos:
            self._end(sequence, "stop")
        elif token in params.stop_token_ids:
            self._end(sequence, "stop", token)
        elif len(sequence.token_ids) >= sequence.max_length:
            self._end(sequence, "length")

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.error = error
        self.finished[reason] += 1
        if self._speculator is not None:
            self._speculator.forget(sequence)

    def _leave(self, ended: Iterable[Sequence]) -> None:
        """Take ended sequences out of the books: highest slot first, so that no row is moved
        that is leaving too. What a failed one has computed is not kept."""
        running: list[Sequence] = []
        for sequence in ended:
            if sequence in self.running:
                running.append(sequence)
            else:
                self.waiting.remove(sequence)
        for sequence in sorted(running, key=self._kv.slot_of, reverse=True):
            self.running.remove(sequence)
            self._placement.vacate(sequence, keep=sequence.finish_reason != "error")

    def _preempt_youngest(self) -> None:
        sequence = self.running.pop()
        self._placement.vacate(sequence, keep=True)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)


def _wants_all_logits(sequence: Sequence) -> bool:
    """Whether prompt logprobs are asked for and not given yet. They belong to the request: its
    first choice computes them."""
    if sequence.request.params.prompt_logprobs is None:
        return False
    return sequence.index == 0 and not sequence.num_generated_tokens


def _event(
    sequence: Sequence,
    sampled: Sampled | None = None,
    prompt_logprobs: PromptLogprobs | None = None,
) -> TokenEvent:
    return TokenEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        token_id=sampled.token_id if sampled is not None else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
        logprobs=sampled.logprobs if sampled is not None else None,
        prompt_logprobs=prompt_logprobs,
        cached_tokens=sequence.num_cached_tokens,
        draft_tokens=sequence.num_draft_tokens,
        accepted_tokens=sequence.num_accepted_tokens,
        first_scheduled_time=sequence.first_scheduled_time,
    )
