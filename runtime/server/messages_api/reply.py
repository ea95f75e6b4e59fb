"""Answers of /v1/messages, whole and streamed."""

import uuid
from collections.abc import Sequence

from trtllm_lite.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_lite.runtime.server.answer_reader import AnswerReader
from trtllm_lite.runtime.server.conversation import Conversation
from trtllm_lite.runtime.server.error_shapes import MESSAGES
from trtllm_lite.runtime.server.errors import ApiError, error_object
from trtllm_lite.runtime.server.messages_api.blocks import ContentBlocks, Json


class MessagesReply:
    """The answer to one request. See `Reply`. The counts at the beginning of a stream are 0 where
    it begins before the prompt is counted; those at its end are always right."""

    def __init__(self, talk: Conversation, max_tokens: int) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model, self._llm = talk.served.name, talk.served.llm
        self._max_tokens = max_tokens
        self._reader = AnswerReader(talk.reading)
        self._blocks = ContentBlocks()
        self._last: RequestOutput | None = None
        self._ended = False

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        (choice,) = output.outputs
        for event in self._reader.whole(output, choice):
            self._blocks.take(event)
        self._blocks.end()
        return self._message(
            content=self._blocks.done, usage=self._usage(output), **self._stop(choice)
        )

    def opening(self) -> list[Json]:
        counts = _prompt_usage(self._last)
        begun = self._message(content=[], usage=counts, stop_reason=None, stop_sequence=None)
        return [{"type": "message_start", "message": begun}, {"type": "ping"}]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Json]:
        (choice,) = output.outputs
        if self._ended:
            return []
        self._last = output
        events = self._reader.new(output, choice)
        made = [told for event in events for told in self._blocks.take(event)]
        if choice.finish_reason is not None:
            self._ended = True
            made += self._blocks.end()
            stop, counts = self._stop(choice), self._usage(output)
            made.append({"type": "message_delta", "delta": stop, "usage": counts})
        return made

    def closing(self) -> list[Json]:
        return [{"type": "message_stop"}]

    def failure(self, error: ApiError) -> list[Json]:
        return [error_object(error, MESSAGES)]

    def _message(self, **fields: object) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, **fields}

    def _stop(self, choice: CompletionOutput) -> Json:
        stopped_by = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if choice.finish_reason == "length":
            # Without room for max_tokens, what ended the answer was the context.
            whole = len(choice.token_ids) >= self._max_tokens
            reason = "max_tokens" if whole else "model_context_window_exceeded"
        elif self._reader.has_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if stopped_by is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped_by}

    def _usage(self, output: RequestOutput) -> Json:
        (choice,) = output.outputs
        thought = self._reader.thought_tokens(self._llm, choice)
        return {
            **_prompt_usage(output),
            "output_tokens": len(choice.token_ids),
            "output_tokens_details": {"thinking_tokens": thought},
        }


def _prompt_usage(output: RequestOutput | None) -> Json:
    """Anthropic counts the prompt in three: what was read from the cache is no part of
    input_tokens. Nothing is written to it on request."""
    prompt, cached = 0, 0
    if output is not None:
        prompt, cached = len(output.prompt_token_ids), output.cached_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": 0,
    }
