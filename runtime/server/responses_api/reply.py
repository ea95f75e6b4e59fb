"""Answers of /v1/responses, whole and streamed."""

import time
import uuid
from collections.abc import Sequence

from trtllm_lite.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_lite.runtime.server.answer_reader import AnswerReader
from trtllm_lite.runtime.server.conversation import Conversation
from trtllm_lite.runtime.server.errors import ApiError, error_object
from trtllm_lite.runtime.server.parsers.events import ContentDelta, Event
from trtllm_lite.runtime.server.protocol.responses import ResponsesRequest
from trtllm_lite.runtime.server.replies import ScoreCursor, usage
from trtllm_lite.runtime.server.responses_api.echo import echoed
from trtllm_lite.runtime.server.responses_api.items import Json, OutputItems
from trtllm_lite.runtime.server.responses_api.translate import wants_scores
from trtllm_lite.runtime.server.token_scores import TokenScores

_OPENING = ("response.created", "response.in_progress")


class ResponsesReply:
    """The answer to one request. See `Reply`. Events are numbered in the order in which they are
    sent, and the opening is sent first, whenever it is asked for."""

    def __init__(self, body: ResponsesRequest, talk: Conversation) -> None:
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._echo = echoed(body, talk)
        self._llm = talk.served.llm
        self._scorer = None
        if wants_scores(body):
            self._scorer = TokenScores(self._llm.tokenizer.token_bytes, body.top_logprobs or 0)
        self._reader = AnswerReader(talk.reading)
        self._items = OutputItems()
        self._cursor = ScoreCursor()
        self._scores: list[Json] = []
        self._number = len(_OPENING)
        self._ending: Json | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        (choice,) = output.outputs
        self._take_scores(choice)
        self._grow(self._reader.whole(output, choice))
        self._end(output, choice)
        return self._ending or {}

    def opening(self) -> list[Json]:
        begun = self._response("in_progress")
        return [
            {"type": kind, "sequence_number": i, "response": begun}
            for i, kind in enumerate(_OPENING)
        ]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Json]:
        (choice,) = output.outputs
        if self._ending is not None:
            return []
        self._take_scores(choice)
        events = self._grow(self._reader.new(output, choice))
        if choice.finish_reason is not None:
            events += self._end(output, choice)
        return [self._numbered(event) for event in events]

    def closing(self) -> list[Json]:
        ending = self._ending or {}
        kind = f"response.{ending.get('status')}"
        return [self._numbered({"type": kind, "response": ending})]

    def failure(self, error: ApiError) -> list[Json]:
        told = error_object(error)["error"]
        facts = {"code": told["code"], "message": told["message"], "param": told["param"]}
        failed = self._response("failed", output=self._items.done)
        # Of the codes that OpenAI has, this is the one for whatever is not the input's fault.
        failed["error"] = {"code": "server_error", "message": told["message"]}
        ends = [{"type": "error", **facts}, {"type": "response.failed", "response": failed}]
        return [self._numbered(event) for event in ends]

    def _take_scores(self, choice: CompletionOutput) -> None:
        if self._scorer is not None:
            fresh = self._cursor.new(0, choice)
            self._scores += [self._scorer.entry(scores) for scores in fresh if scores is not None]

    def _grow(self, events: Sequence[Event]) -> list[Json]:
        """What more text means. Scores wait for the text that they belong to."""
        made: list[Json] = []
        for event in events:
            scores: list[Json] = []
            if isinstance(event, ContentDelta):
                scores, self._scores = self._scores, []
            made += self._items.take(event, scores)
        return made

    def _end(self, output: RequestOutput, choice: CompletionOutput) -> list[Json]:
        made = self._grow([ContentDelta("")] if self._scores else [])
        cut = choice.finish_reason == "length"
        made += self._items.end("incomplete" if cut else "completed")
        self._ending = self._response(
            "incomplete" if cut else "completed",
            output=self._items.done,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            completed_at=None if cut else int(time.time()),
            usage=self._usage(output, choice),
        )
        return made

    def _usage(self, output: RequestOutput, choice: CompletionOutput) -> Json:
        counts, thought = usage([output]), self._reader.thought_tokens(self._llm, choice)
        return {
            "input_tokens": counts["prompt_tokens"],
            # Nothing is written to the cache on request.
            "input_tokens_details": {
                "cached_tokens": output.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": counts["total_tokens"],
        }

    def _response(self, status: str, **fields: object) -> Json:
        empty: Json = {"output": [], "error": None, "incomplete_details": None, "usage": None}
        head = {"id": self._id, "object": "response", "created_at": self._created}
        return {**head, "completed_at": None, "status": status, **self._echo, **empty, **fields}

    def _numbered(self, event: Json) -> Json:
        number, self._number = self._number, self._number + 1
        return {**event, "sequence_number": number}
