"""POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trtllm_lite.runtime.server.chat_reply import ChatReply
from trtllm_lite.runtime.server.conversation import conversation
from trtllm_lite.runtime.server.generation import GenerationRoute, Plan
from trtllm_lite.runtime.server.protocol.chat import CHAT_REFUSED, ChatRequest
from trtllm_lite.runtime.server.protocol.common import REFUSED, check_refused


class ChatRoute(GenerationRoute):
    """Answers a conversation."""

    renames: ClassVar[Mapping[str, str]] = {"prompt": "messages", "prompt_token_ids": "messages"}

    def length_name(self, raw: Mapping[str, Any]) -> str:
        newer = "max_completion_tokens"
        return super().length_name(raw) if raw.get(newer) is None else newer

    async def plan(self, raw: dict[str, Any]) -> Plan:
        check_refused(raw, REFUSED, CHAT_REFUSED)
        body = ChatRequest.parse(raw)
        talk = await conversation(self._service, body)
        reply = ChatReply(body, talk.served, talk.ask.params.n, talk.reading)
        return Plan(talk.served, [talk.ask], reply, bool(body.stream))
