"""POST /v1/completions."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.server.completion_reply import CompletionReply
from trtllm_lite.runtime.server.convert import Ask, completion_asks
from trtllm_lite.runtime.server.errors import invalid
from trtllm_lite.runtime.server.generation import GenerationRoute, Plan
from trtllm_lite.runtime.server.protocol.common import REFUSED, check_refused
from trtllm_lite.runtime.server.protocol.completion import COMPLETION_REFUSED, CompletionRequest
from trtllm_lite.runtime.server.service import Served
from trtllm_lite.runtime.server.tracing import Operation


class CompletionRoute(GenerationRoute):
    """Continues prompts."""

    operation: ClassVar[Operation] = "text_completion"
    renames: ClassVar[Mapping[str, str]] = {
        "prompt_token_ids": "prompt",
        "prompt_logprobs": "logprobs",
    }

    async def plan(self, raw: dict[str, Any]) -> Plan:
        check_refused(raw, REFUSED, COMPLETION_REFUSED)
        body = CompletionRequest.parse(raw)
        served = self._service.resolve(body.model)
        room = served.llm.config.max_sequence_tokens
        limits = self._service.config.limits
        asks = completion_asks(body, served.llm.default_params(), limits, room)
        echoed = await _prompt_texts(served, asks) if body.echo else None
        reply = CompletionReply(body, served, asks[0].params.n, echoed, _token_text(served))
        return Plan(served, asks, reply, bool(body.stream))


async def _prompt_texts(served: Served, asks: Sequence[Ask]) -> list[str]:
    """The text of every prompt, off the event loop where ids have to become text."""
    tokenizer, texts = served.llm.tokenizer, []
    for ask in asks:
        ids = ask.source.prompt_token_ids
        if ids is None:
            texts.append(ask.source.prompt or "")
            continue
        known = [i for i in ids if i < tokenizer.vocab_size]
        if len(known) < len(list(ids)):
            raise invalid("prompt: holds token ids that the tokenizer does not have", "prompt")
        loop = asyncio.get_running_loop()
        texts.append(await loop.run_in_executor(None, _decode, served, known))
    return texts


def _decode(served: Served, ids: list[int]) -> str:
    return served.llm.tokenizer.decode(ids, skip_special_tokens=False)


def _token_text(served: Served) -> Callable[[int], str]:
    try:
        return served.llm.tokenizer.token_text
    except RequestError:
        # A bundle without a tokenizer: its tokens have no text.
        return lambda token_id: ""
