"""A conversation: its messages, the answer that is being made, and its figures.

Knows nothing of terminals.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_lite.runtime.errors import StepError
from trtllm_lite.tools.console import format_seconds
from trtllm_lite.tools.metrics import new_tokens

if TYPE_CHECKING:
    from trtllm_lite.runtime.llm import LLM
    from trtllm_lite.runtime.outputs import RequestOutput
    from trtllm_lite.runtime.sampling_params import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True)
class Totals:
    """Sums over the conversation since the program started."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    def plus(self, result: "RequestOutput", seconds: float) -> "Totals":
        """The sums with one more answer."""
        return Totals(
            self.turns + 1,
            self.prompt_tokens + len(result.prompt_token_ids),
            self.cached_tokens + result.cached_tokens,
            self.new_tokens + new_tokens(result),
            self.seconds + seconds,
        )


class Conversation:
    """Messages alternate: system (optional), user, assistant, user, ...

    A turn that fails before any text leaves no trace; one that is stopped keeps what was said.
    """

    def __init__(self, llm: "LLM", params: "SamplingParams", system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self.system = system
        self.messages: list[Message] = []
        self.last: RequestOutput | None = None
        self.totals = Totals()

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.messages = []
        self.last = None

    def set_system(self, text: str) -> None:
        """A new system message, and no turns: the old ones answered to another one."""
        self.reset()
        self.system = text or None

    def ask(self, text: str) -> Generator[str, None, None]:
        """The pieces of the answer to `text`. Closing the iterator stops the answer.

        Raises ContextLengthError when the conversation has become too long, StepError when the
        engine failed on it.
        """
        question: Message = {"role": "user", "content": text}
        said = ""
        self.last = None
        try:
            for result in self._results([*self._opening(), *self.messages, question]):
                self.last = result
                said = result.outputs[0].text
                yield result.outputs[0].delta
            self._check_last()
        finally:
            if said:
                self.messages += [question, {"role": "assistant", "content": said}]
            self._count()

    def _opening(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _results(self, messages: list[Message]) -> Iterator["RequestOutput"]:
        with closing(self._llm.stream(messages=messages, params=self._params)) as growing:
            yield from growing

    def _check_last(self) -> None:
        if self.last is not None and self.last.outputs[0].error:
            raise StepError(self.last.outputs[0].error)

    def _count(self) -> None:
        if self.last is not None:
            metrics = self.last.metrics
            end = metrics.finished_time or metrics.first_token_time or metrics.arrival_time
            self.totals = self.totals.plus(self.last, end - metrics.arrival_time)

    @property
    def cut_by_context(self) -> bool:
        """The last answer ended because the context was full."""
        if self.last is None or self.last.outputs[0].finish_reason != "length":
            return False
        return self.context_used >= self.context_size

    @property
    def context_used(self) -> int:
        """Tokens of the last prompt and its answer."""
        if self.last is None:
            return 0
        return len(self.last.prompt_token_ids) + new_tokens(self.last)

    @property
    def context_size(self) -> int:
        """Tokens that the context holds."""
        return self._llm.config.max_sequence_tokens

    def stats(self) -> list[tuple[str, str]]:
        """Name and value of each figure for `/stats`."""
        t = self.totals
        rows = [
            ("turns", str(t.turns)),
            ("context", f"{self.context_used} of {self.context_size} tokens"),
            ("prompt tokens", f"{t.prompt_tokens} ({t.cached_tokens} from the prefix cache)"),
            ("new tokens", f"{t.new_tokens} in {format_seconds(t.seconds)}"),
        ]
        if self.last is not None:
            rows.append(("last TTFT", format_seconds(self.last.metrics.ttft)))
            rows.append(("last TPOT", format_seconds(self.last.metrics.tpot)))
        return rows
