"""POST /v1/chat/completions."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.server.chat_reply import ChatReply
from trtllm_lite.runtime.server.constraints import grammar_of
from trtllm_lite.runtime.server.convert import chat_ask, chat_options, check_size
from trtllm_lite.runtime.server.errors import invalid
from trtllm_lite.runtime.server.generation import GenerationRoute, Plan
from trtllm_lite.runtime.server.parsers.reasoning import opens_reasoning
from trtllm_lite.runtime.server.parsers.tool_grammar import Thought
from trtllm_lite.runtime.server.protocol.chat import CHAT_REFUSED, ChatRequest
from trtllm_lite.runtime.server.protocol.common import REFUSED, check_refused
from trtllm_lite.runtime.server.service import Served
from trtllm_lite.runtime.server.tool_calls import Reading, ToolUse, tool_use


class ChatRoute(GenerationRoute):
    """Answers a conversation."""

    renames: ClassVar[Mapping[str, str]] = {"prompt": "messages", "prompt_token_ids": "messages"}

    async def plan(self, raw: dict[str, Any]) -> Plan:
        check_refused(raw, REFUSED, CHAT_REFUSED)
        body = ChatRequest.parse(raw)
        served = self._service.resolve(body.model)
        room = served.llm.config.max_sequence_tokens
        limits = self._service.config.limits
        check_size("messages", body.messages, limits, room)
        tools, grammar = tool_use(body, served.card), grammar_of(body)
        if tools is not None and grammar is not None:
            raise invalid(f"{grammar.param}: not together with tools", grammar.param)
        # Text that a grammar keeps to a form has no room for reasoning.
        reading = Reading(tools, served.card.reasoning and grammar is None)
        if tools is not None and tools.forced:
            grammar = await _forced(served, body, tools)
        defaults = served.llm.default_params()
        ask = chat_ask(body, defaults, limits, room, grammar=grammar, tools=tools)
        return Plan(
            served, [ask], ChatReply(body, served, ask.params.n, reading), bool(body.stream)
        )


async def _forced(served: Served, body: ChatRequest, tools: ToolUse) -> GrammarSpec:
    """The grammar of an answer that is calls. Whether reasoning comes first is the template's
    doing, so a reasoning model's prompt is rendered for it, off the event loop."""
    tokenizer = served.llm.tokenizer
    if not served.card.reasoning:
        return tools.grammar(tokenizer, Thought.NONE)
    options = chat_options(body, tools)

    def render() -> str:
        return tokenizer.apply_chat_template(
            body.messages,
            tools=options.tools,
            add_generation_prompt=options.add_generation_prompt,
            **options.template,
        )

    prompt = await asyncio.get_running_loop().run_in_executor(None, render)
    thought = Thought.OPENED if opens_reasoning(prompt) else Thought.POSSIBLE
    return tools.grammar(tokenizer, thought)
