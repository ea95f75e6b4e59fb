"""The comparisons behind the certificate's gates. Each returns numbers; none decides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.exporter.certificate import PromptParity, finite
from trtllm_lite.exporter.prompts import Prompt
from trtllm_lite.exporter.reference import Reference, relative_kl
from trtllm_lite.exporter.replay import decode, greedy, prefill
from trtllm_lite.runtime.backends.base import Session
from trtllm_lite.runtime.progress import Progress

Array = npt.NDArray[Any]
GROUP = 4
# Right-padding to a longer prompt than this would cost more than running it alone.
SHORT = 256


def _groups(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Short prompts by fours, each long one alone."""
    short = [p for p in prompts if len(p.token_ids) <= SHORT]
    for start in range(0, len(short), GROUP):
        yield short[start : start + GROUP]
    for prompt in prompts:
        if len(prompt.token_ids) > SHORT:
            yield [prompt]


@dataclass
class Findings:
    """What the checks have measured so far; the largest distance of each kind. `greedy_gap`: by how
    much the reference's logit of a chosen token is below its largest one, at most."""

    prompts: list[PromptParity] = field(default_factory=list)
    logit_scale: float = 0.0
    agreed: int = 0
    compared: int = 0
    greedy_gap: float = 0.0
    distances: dict[str, float] = field(default_factory=dict)
    worst_tokens: list[int] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def widen(self, name: str, a: Array, b: Array) -> None:
        """Keep the largest absolute distance seen under `name`."""
        distance = float(np.abs(a - b).max())
        worst = max(self.distances.get(name, 0.0), distance)
        self.distances[name] = worst if np.isfinite(distance) else float("inf")


@dataclass(frozen=True)
class Checks:
    """The two sides that are compared."""

    session: Session
    reference: Reference
    recompute_at: int | None
    progress: Progress

    def greedy_against_reference(
        self, prompts: Sequence[Prompt], num_tokens: int, findings: Findings
    ) -> None:
        """Greedy decoding in ragged groups. The reference sees prompt and generated tokens in one
        pass: when each token is its argmax, its own greedy run would have chosen the same."""
        for group in _groups(prompts):
            rows = [p.token_ids for p in group]
            tokens, logits = greedy(self.session, rows, num_tokens, self.recompute_at)
            for row, prompt in enumerate(group):
                self._compare(prompt, tokens[row], logits[:, row], findings)
                self.progress.advance(len(findings.prompts), len(prompts), "prompts")

    def alone(self, prompts: Sequence[Prompt], num_tokens: int, findings: Findings) -> None:
        """A row alone gives the logits it gave among others."""
        rows = [p.token_ids for p in prompts]
        _, together = greedy(self.session, rows, num_tokens, self.recompute_at)
        for row, prompt in enumerate(prompts):
            _, logits = greedy(self.session, [prompt.token_ids], num_tokens, self.recompute_at)
            findings.widen("batched_equals_alone", logits[:, 0], together[:, row])

    def chunked(self, prompt: Prompt, sizes: Sequence[int], findings: Findings) -> None:
        """Prefill in chunks equals prefill in one pass."""
        whole = prefill(self.session, [prompt.token_ids])
        for size in sizes:
            parts = prefill(self.session, [prompt.token_ids], size)
            findings.widen("chunked_equals_whole", parts, whole)

    def decode_equals_prefill(self, prompt: Prompt, findings: Findings) -> None:
        """Prefill, then single tokens, equals one prefill of everything."""
        ids = prompt.token_ids
        head = max(1, len(ids) - 8)
        if self.recompute_at is not None and head <= self.recompute_at < len(ids):
            # Beyond the switch from the start: what was computed before it does not count after.
            head = self.recompute_at + 1
        logits = prefill(self.session, [ids[:head]])
        for length in range(head, len(ids)):
            logits = decode(self.session, [ids[length]], [length])
        findings.widen("decode_equals_prefill", logits, prefill(self.session, [ids]))

    def _expected(self, ids: list[int], last: int) -> Array:
        """Reference logits of the last positions, each as at the length it was computed at: on
        both sides of a rope's switch, all positions have other angles."""
        switch, first = self.recompute_at, len(ids) - last + 1
        if switch is None or not first <= switch < len(ids):
            return self.reference.logits(ids, last)
        before = self.reference.logits(ids[:switch], switch - first + 1)
        return np.concatenate([before, self.reference.logits(ids, len(ids) - switch)])

    def _compare(
        self, prompt: Prompt, tokens: list[int], logits: Array, findings: Findings
    ) -> None:
        ids = [*prompt.token_ids, *tokens[:-1]]
        expected = self._expected(ids, len(tokens))
        right = expected.argmax(axis=1) == np.array(tokens)
        divergence = None if right.all() else int(np.argmin(right))
        # After the first divergence both sides still see the same tokens, so all steps compare.
        findings.widen("logits", logits, expected)
        chosen = np.take_along_axis(expected, np.array(tokens)[:, None], axis=1)[:, 0]
        gap = float(np.max(expected.max(axis=1) - chosen))
        findings.greedy_gap = max(findings.greedy_gap, gap)
        steps = [relative_kl(e, g) for e, g in zip(expected, logits, strict=True)]
        findings.logit_scale = max(findings.logit_scale, float(np.abs(expected).max()))
        findings.agreed += int(right.sum())
        findings.compared += len(tokens)
        distance = float(np.abs(logits - expected).max())
        findings.prompts.append(
            PromptParity(
                prompt.name,
                len(prompt.token_ids),
                len(tokens),
                divergence,
                finite(distance),
                finite(float(np.max(steps))),
                finite(float(np.mean(steps))),
            )
        )
        # Negated, so that a NaN is the worst.
        if not distance < findings.distances["logits"]:
            findings.worst_tokens = ids
