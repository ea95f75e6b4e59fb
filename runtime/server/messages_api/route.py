"""POST /v1/messages and POST /v1/messages/count_tokens."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.server.body import read_object
from trtllm_lite.runtime.server.conversation import conversation, off_loop, prompt_text
from trtllm_lite.runtime.server.convert import chat_options, check_size, renamed
from trtllm_lite.runtime.server.errors import ApiError, ClientGoneError, from_exception, invalid
from trtllm_lite.runtime.server.event_form import NAMED, EventForm
from trtllm_lite.runtime.server.generation import GenerationRoute, Plan
from trtllm_lite.runtime.server.messages_api.reply import MessagesReply
from trtllm_lite.runtime.server.messages_api.translate import chat_request, prompt_request
from trtllm_lite.runtime.server.protocol.common import REFUSED, check_refused
from trtllm_lite.runtime.server.protocol.messages import (
    MESSAGES_REFUSED,
    CountTokensRequest,
    MessagesRequest,
)
from trtllm_lite.runtime.server.protocol.tool_types import check_tool_types
from trtllm_lite.runtime.server.responses import json_response
from trtllm_lite.runtime.server.service import Served, Service
from trtllm_lite.runtime.server.tool_calls import tool_use

_RENAMES: Mapping[str, str] = MappingProxyType(
    {
        "prompt": "messages",
        "prompt_token_ids": "messages",
        "continue_final_message": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
    }
)


class MessagesRoute(GenerationRoute):
    """Answers a conversation."""

    events: ClassVar[EventForm] = NAMED
    renames: ClassVar[Mapping[str, str]] = _RENAMES

    async def plan(self, raw: dict[str, Any]) -> Plan:
        _check(raw)
        body = MessagesRequest.parse(raw)
        served = self._service.resolve(body.model)
        chat = chat_request(body, _variables(served), reasons=served.card.reasoning)
        talk = await conversation(self._service, chat)
        ask = replace(talk.ask, optional_length=True)
        reply = MessagesReply(talk, body.max_tokens)
        return Plan(talk.served, [ask], reply, bool(body.stream))


class CountTokensRoute:
    """Counts the tokens of the prompt that /v1/messages would run. Errors are ApiError."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def count(self, request: Request) -> Response:
        """As {"input_tokens": n}."""
        limits = self._service.config.limits
        try:
            raw = await read_object(request.scope, request.receive, limits)
            return json_response({"input_tokens": await self._count(raw)})
        except ClientGoneError:
            raise invalid("the client left") from None
        except (ApiError, RequestError) as error:
            raise renamed(from_exception(error), _RENAMES) from None

    async def _count(self, raw: dict[str, Any]) -> int:
        _check(raw)
        body = CountTokensRequest.parse(raw)
        served = self._service.resolve(body.model)
        chat = prompt_request(body, _variables(served), reasons=served.card.reasoning)
        room = served.llm.config.max_sequence_tokens
        tools = tool_use(chat, served.card)
        check_size("messages", chat.messages, self._service.config.limits, room)
        check_size("tools", raw.get("tools"), self._service.config.limits, room)
        text = await prompt_text(served, chat.messages, chat_options(chat, tools))
        tokenizer = served.llm.tokenizer
        return len(await off_loop(lambda: tokenizer.encode(text, add_special_tokens=False)))


def _check(raw: dict[str, Any]) -> None:
    check_refused(raw, MESSAGES_REFUSED, REFUSED)
    check_tool_types(raw, "custom")


def _variables(served: Served) -> frozenset[str]:
    """What the model's chat template uses; nothing where it has none, which is told later."""
    return served.llm.tokenizer.template_variables
