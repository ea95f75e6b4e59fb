"""Answers of /v1/completions, whole and streamed."""

from collections.abc import Callable, Sequence
from typing import Any

from trtllm_lite.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_lite.runtime.server.errors import ApiError, error_object
from trtllm_lite.runtime.server.protocol.completion import CompletionRequest
from trtllm_lite.runtime.server.replies import (
    Head,
    ScoreCursor,
    Tokens,
    UsagePlan,
    chosen,
    likeliest,
    scored_tokens,
    usage,
)
from trtllm_lite.runtime.server.service import Served

_KIND = "text_completion"


class CompletionReply:
    """The answer to one or more prompts. Choice i of prompt p has index p * n + i. See `Reply`.

    `echoed`: the text of each prompt, which comes first; None without echo. `token_text`: the text
    of one token id.
    """

    def __init__(
        self,
        body: CompletionRequest,
        served: Served,
        n: int,
        echoed: Sequence[str] | None,
        token_text: Callable[[int], str],
    ) -> None:
        self._head = Head.new("cmpl", served)
        self._n = n
        self._echoed = echoed
        self._token_text = token_text
        self._logprobs = body.logprobs
        self._scored_only = body.max_tokens == 0
        self._usage = UsagePlan.of(body)
        self._cursor = ScoreCursor(self._scored)
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._latest: dict[int, RequestOutput] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        self._latest = dict(enumerate(outputs))
        choices = [
            self._choice(prompt, choice, self._text(prompt, choice), self._tokens(output, choice))
            for prompt, output in enumerate(outputs)
            for choice in output.outputs
        ]
        counts = usage(outputs, scored_only=self._scored_only)
        return {**self._head.of(_KIND), "choices": choices, "usage": counts}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        self._latest[prompt] = output
        return [chunk for choice in output.outputs for chunk in self._new(prompt, output, choice)]

    def closing(self) -> list[dict[str, Any]]:
        if not self._usage.at_end:
            return []
        return [{**self._head.of(_KIND), "choices": [], "usage": self._counts()}]

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        return [error_object(error)]

    def _counts(self) -> dict[str, Any]:
        return usage(self._latest.values(), scored_only=self._scored_only)

    def _text(self, prompt: int, choice: CompletionOutput) -> str:
        made = "" if self._scored_only else choice.text
        return made if self._echoed is None else self._echoed[prompt] + made

    def _tokens(self, output: RequestOutput, choice: CompletionOutput) -> Tokens:
        """All of a choice's scored tokens, those of an echoed prompt first."""
        made = [] if self._scored_only else list(self._scored(choice))
        return [*self._prompt_tokens(output), *made]

    def _scored(self, choice: CompletionOutput) -> Tokens:
        """With an echo, the token that ended the answer too, as vLLM has it: evaluation harnesses
        ask for one token after the prompt and drop the last score."""
        return scored_tokens(choice) if self._echoed is None else choice.logprobs or []

    def _prompt_tokens(self, output: RequestOutput) -> Tokens:
        return [] if self._echoed is None else output.prompt_logprobs or []

    def _new(
        self, prompt: int, output: RequestOutput, choice: CompletionOutput
    ) -> list[dict[str, Any]]:
        index = prompt * self._n + choice.index
        if index in self._ended:
            return []
        text, tokens = "" if self._scored_only else choice.delta, self._cursor.new(prompt, choice)
        tokens = [] if self._scored_only else list(tokens)
        if index not in self._begun:
            self._begun.add(index)
            text = text if self._echoed is None else self._echoed[prompt] + text
            tokens = [*self._prompt_tokens(output), *tokens]
        if choice.finish_reason is not None:
            self._ended.add(index)
        elif not text and not (tokens and self._logprobs is not None):
            return []
        chunk = {**self._head.of(_KIND), "choices": [self._choice(prompt, choice, text, tokens)]}
        if self._usage.continuous:
            chunk["usage"] = self._counts()
        elif self._usage.at_end:
            chunk["usage"] = None
        return [chunk]

    def _choice(
        self, prompt: int, choice: CompletionOutput, text: str, tokens: Tokens
    ) -> dict[str, Any]:
        index = prompt * self._n + choice.index
        reason = choice.finish_reason
        return {
            "index": index,
            "text": text,
            "logprobs": self._scores(prompt, index, tokens),
            "finish_reason": "length" if reason is not None and self._scored_only else reason,
            "stop_reason": choice.stop_reason,
        }

    def _scores(self, prompt: int, index: int, tokens: Tokens) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        texts, scores, tops, offsets = [], [], [], []
        for entry in tokens:
            taken = None if entry is None else chosen(entry)
            text = self._first_text(prompt) if taken is None else taken.decoded_token
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(text)
            texts.append(text)
            scores.append(None if taken is None else taken.logprob)
            tops.append(None if entry is None else self._top(entry))
            offsets.append(offset)
        return {
            "tokens": texts,
            "token_logprobs": scores,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _first_text(self, prompt: int) -> str:
        """Text of the prompt's first token, which has no probability: nothing comes before it."""
        return self._token_text(self._latest[prompt].prompt_token_ids[0])

    def _top(self, entry: Any) -> dict[str, float]:
        """Token text to logprob, of the likeliest and of the one that was taken. Of tokens that
        look alike the likeliest counts."""
        made: dict[str, float] = {}
        for each in (*likeliest(entry, self._logprobs or 0), chosen(entry)):
            made.setdefault(each.decoded_token, each.logprob)
        return made
