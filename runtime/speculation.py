"""Prompt lookup decoding: guess the next tokens from the sequence's own text, check them at once.

A draft is what followed the last time that the sequence ended in the same few tokens (Saxena 2023,
"Prompt Lookup Decoding"). One decode run computes the logits behind every token of it, for little
more than the price of one token while reading the weights is what a run costs.

Results are the same as without drafts, token by token. Speculative sampling in general (Leviathan
et al. 2023, arXiv:2211.17192) accepts a drafted token with the ratio of two probabilities and
otherwise draws from what is left. Here the draft is certain of its token, so its ratio is the
model's own probability of it, and that is the probability with which an ordinary draw from the
model gives this token. So each position is drawn as always, in order, with the sequence's own
random stream and after all penalties; as long as the token drawn is the drafted one, the logits
behind it are those of the real sequence and the next position may be drawn too. The first other
token is the real next token, and what was computed behind it is dropped.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from trtllm_lite.runtime.backends.base import DecodeCost
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.ngram_index import NgramIndex
from trtllm_lite.runtime.request import Sequence

ONE_TOKEN_DECODE = (
    "the bundle's decode graph takes one token at a time; export it again, or leave speculation out"
)
SHORTEST, LONGEST = 2, 4
"""Tokens that the end of a sequence and an earlier place must have in common."""
MAX_ROWS = 8
"""Rows of a run beyond which arithmetic costs more than reading weights, and drafts do not pay."""
MEMORY = 0.8
"""How much of what was known about a sequence's drafts still counts one checked token later."""
EARNED = 0.015
"""Of a token: what each token of a sequence adds to what its drafts may lose."""
FIRST_CREDIT, MOST_CREDIT = 0.5, 8.0


@dataclass(eq=False)
class _Drafter:
    """What is known of one sequence. `credit`, in tokens, is what its drafts may still cost more
    than they bring: they pay before they are checked and are paid back by accepted tokens."""

    ends: frozenset[int]
    index: NgramIndex = field(default_factory=lambda: NgramIndex(SHORTEST, LONGEST))
    accepted: float = 0.0
    checked: float = 0.0
    credit: float = FIRST_CREDIT
    rewarded: int = 0

    @property
    def rate(self) -> float:
        """The probability that a drafted token is accepted when all before it are."""
        return (self.accepted + 0.5) / (self.checked + 1.0)

    def expected(self, tokens: int) -> float:
        """How many of `tokens` drafted tokens will be accepted."""
        rate = self.rate
        return rate * (1.0 - rate**tokens) / (1.0 - rate)

    def learn(self, drafted: int, accepted: int) -> None:
        checked = min(accepted + 1, drafted)
        kept = MEMORY**checked
        self.accepted = kept * self.accepted + accepted
        self.checked = kept * self.checked + checked
        self.credit = min(self.credit + accepted, MOST_CREDIT)

    def earn(self, generated: int) -> None:
        self.credit = min(self.credit + EARNED * (generated - self.rewarded), MOST_CREDIT)
        self.rewarded = generated


class Speculator:
    """Drafts for the decoding rows of one engine, as long as they are likely to save time.

    All rows of a run are padded to its longest draft, so one length is chosen for the run: the one
    with the most expected tokens in a time, by the acceptance of each sequence and the costs of
    runs. Two things keep it from doing harm. Without an expected gain only the shortest draft is
    tried, now and then; and whatever is expected, drafts pay in advance out of a small credit. So
    over its life a sequence loses at most EARNED of its time and FIRST_CREDIT tokens.

    Nothing is measured while it runs: which drafts are made depends on the tokens alone, so that
    the same requests always run in the same shapes. `cost` is that of the session.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...],
        recompute_at: int | None,
        cost: DecodeCost,
    ) -> None:
        self._config = config
        self._eos = frozenset(eos_token_ids)
        self._recompute_at = recompute_at
        self._run_cost = cost
        self._drafters: dict[Sequence, _Drafter] = {}

    def drafts(self, rows: Ordered[Sequence]) -> Mapping[Sequence, tuple[int, ...]]:
        """Tokens to check behind the newest one of each row; rows without any are left out.

        A draft never reaches a sequence's last token, its change of rope regime or the step's
        budget, and holds no token that would end it, so nothing is drawn behind an end.
        """
        if not rows or len(rows) > MAX_ROWS:
            return {}
        room = self._config.max_num_batched_tokens // len(rows) - 1
        asking = [s for s in rows if self._wanted(s)]
        found = {s: d for s in asking if (d := self._guess(s, min(room, self._limit(s))))}
        length = self._length(found, len(rows)) if found else 0
        return {s: d[:length] for s, d in found.items()} if length else {}

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """So many tokens of its draft were accepted."""
        self._drafters[sequence].learn(drafted, accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._drafters.pop(sequence, None)

    def _limit(self, sequence: Sequence) -> int:
        """The most tokens of a draft, each of which leaves room for the one drawn behind it."""
        length = len(sequence.token_ids)
        limit = min(self._config.max_draft_tokens, sequence.max_length - length - 1)
        if self._recompute_at is not None and length <= self._recompute_at:
            limit = min(limit, self._recompute_at - length)
        return limit

    def _guess(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        if most < 1:
            return ()
        if sequence not in self._drafters:
            ignored = self._eos if sequence.params.ignore_eos else frozenset[int]()
            ends = (self._eos - ignored) | frozenset(sequence.params.stop_token_ids)
            self._drafters[sequence] = _Drafter(ends)
        drafter = self._drafters[sequence]
        match = drafter.index.match(sequence.token_ids, most)
        return _before(drafter.ends, match.tokens) if match is not None else ()

    def _wanted(self, sequence: Sequence) -> bool:
        wanted = sequence.params.speculation
        return self._config.speculation == "ngram" if wanted is None else wanted

    def _length(self, found: Mapping[Sequence, tuple[int, ...]], rows: int) -> int:
        """The length that drafts are cut to; 0 for none. Takes what it may cost out of credits."""
        longest = max(map(len, found.values()))
        # Powers of two, so that runs have few shapes.
        choices = [1 << i for i in range(longest.bit_length())]
        best = max(choices, key=lambda n: self._speed(found, rows, n))
        if self._speed(found, rows, best) <= 1.0:
            best = 1
        price = (self._cost(rows, best) - 1.0) * rows
        drafters = [self._drafters[s] for s in found]
        for sequence in found:
            self._drafters[sequence].earn(sequence.num_generated_tokens)
        if sum(d.credit for d in drafters) < price:
            return 0
        for drafter in drafters:
            drafter.credit -= price / len(drafters)
        return best

    def _speed(self, found: Mapping[Sequence, tuple[int, ...]], rows: int, length: int) -> float:
        """Expected tokens of a run with drafts of `length`, beside what the same time would give
        without drafts."""
        gain = sum(self._drafters[s].expected(min(length, len(d))) for s, d in found.items())
        return (1.0 + gain / rows) / self._cost(rows, length)

    def _cost(self, rows: int, length: int) -> float:
        """A run with drafts of `length`, in runs of one token a row."""
        return self._run_cost.of(rows * (1 + length)) / self._run_cost.of(rows)


def _before(ends: Iterable[int], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens in front of the first of `ends`."""
    found = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:found]
