"""POST /v1/responses, and what there is to say of stored responses."""

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from trtllm_lite.runtime.server.conversation import conversation
from trtllm_lite.runtime.server.errors import ApiError, invalid
from trtllm_lite.runtime.server.event_form import NAMED, EventForm
from trtllm_lite.runtime.server.generation import GenerationRoute, Plan
from trtllm_lite.runtime.server.protocol.common import REFUSED, check_refused
from trtllm_lite.runtime.server.protocol.responses import (
    RESPONSES_REFUSED,
    ResponsesRequest,
)
from trtllm_lite.runtime.server.protocol.tool_types import check_tool_types
from trtllm_lite.runtime.server.responses_api.reply import ResponsesReply
from trtllm_lite.runtime.server.responses_api.translate import chat_request, wants_scores


class ResponsesRoute(GenerationRoute):
    """Answers an input."""

    events: ClassVar[EventForm] = NAMED
    renames: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "prompt_token_ids": "input",
        "messages": "input",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }

    def length_name(self, raw: Mapping[str, Any]) -> str:
        return "max_output_tokens"

    async def plan(self, raw: dict[str, Any]) -> Plan:
        check_refused(raw, RESPONSES_REFUSED, REFUSED)
        check_tool_types(raw, "function")
        body = ResponsesRequest.parse(raw)
        talk = await conversation(self._service, chat_request(body))
        if wants_scores(body) and not talk.reading.is_plain:
            # Tokens of calls and of reasoning are none of the text's.
            why = "not together with tools, nor where the answer may hold reasoning"
            raise invalid(f"include: {why}", "include")
        return Plan(talk.served, [talk.ask], ResponsesReply(body, talk), bool(body.stream))


async def not_stored(request: Request) -> Response:
    """Every request about an earlier response. Raises ApiError 404."""
    message = "responses are not stored by this server: send the whole conversation as input"
    raise ApiError(404, message, param="id", code="response_not_found")
