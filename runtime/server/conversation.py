"""From a checked conversation to what the engine runs, for every route that takes one."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trtllm_lite.runtime.chat_messages import check_messages
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.request_maker import ChatOptions
from trtllm_lite.runtime.server.constraints import grammar_of
from trtllm_lite.runtime.server.convert import Ask, chat_ask, chat_options, check_size
from trtllm_lite.runtime.server.errors import invalid
from trtllm_lite.runtime.server.parsers.reasoning import leaves_reasoning_open, opens_reasoning
from trtllm_lite.runtime.server.parsers.tool_grammar import Thought
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.protocol.common import SharedFields
from trtllm_lite.runtime.server.service import Served, Service
from trtllm_lite.runtime.server.tool_calls import Reading, ToolUse, tool_use

T = TypeVar("T")


@dataclass(frozen=True)
class Conversation:
    """A prompt, the model that continues it, and how its answer is read."""

    served: Served
    ask: Ask
    reading: Reading


async def conversation(service: Service, body: ChatRequest) -> Conversation:
    """Everything about a request but how its answer is told. Raises ApiError, RequestError."""
    served = service.resolve(body.model)
    room, limits = served.llm.config.max_sequence_tokens, service.config.limits
    check_size("messages", body.messages, limits, room)
    tools, grammar = tool_use(body, served.card), grammar_of(body)
    if tools is not None and grammar is not None:
        raise invalid(f"{grammar.param}: not together with tools", grammar.param)
    # Text that a grammar keeps to a form has no room for reasoning.
    reading = Reading(tools, served.card.reasoning and grammar is None, _opened(body))
    if tools is not None and tools.forced:
        grammar = await _forced(served, body, tools)
    defaults = served.llm.default_params()
    ask = chat_ask(body, defaults, limits, room, grammar=grammar, tools=tools)
    return Conversation(served, ask, reading)


async def prompt_text(served: Served, messages: list[dict[str, Any]], options: ChatOptions) -> str:
    """What the model's chat template makes of messages. Raises RequestError."""

    def render() -> str:
        return served.llm.tokenizer.apply_chat_template(
            messages,
            tools=options.tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **options.template,
        )

    return await off_loop(render)


async def off_loop(work: Callable[[], T]) -> T:
    """The result of work that would hold up the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


def shared_fields(body: SharedFields) -> dict[str, Any]:
    """The fields of a body that mean the same in every route, as the body of another takes them."""
    return {name: getattr(body, name) for name in SharedFields.model_fields}


async def _forced(served: Served, body: ChatRequest, tools: ToolUse) -> GrammarSpec:
    """The grammar of an answer that is calls. Whether reasoning comes first is the template's
    doing, so a reasoning model's prompt is rendered for it."""
    tokenizer = served.llm.tokenizer
    if not served.card.reasoning:
        return tools.grammar(tokenizer, Thought.NONE)
    prompt = await prompt_text(served, body.messages, chat_options(body, tools))
    thought = Thought.OPENED if _opened(body)(prompt) else Thought.POSSIBLE
    return tools.grammar(tokenizer, thought)


def _opened(body: ChatRequest) -> Callable[[str], bool]:
    """Whether the prompt that the template made of the body leaves reasoning open."""
    if not body.continue_final_message:
        return opens_reasoning

    def opened(prompt: str) -> bool:
        (last,) = check_messages(body.messages[-1:])
        return opens_reasoning(prompt) or leaves_reasoning_open(last["content"])

    return opened
