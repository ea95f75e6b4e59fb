"""POST /tokenize and POST /detokenize."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trtllm_lite.runtime.server.body import read_object
from trtllm_lite.runtime.server.conversation import off_loop
from trtllm_lite.runtime.server.convert import chat_options, check_size
from trtllm_lite.runtime.server.errors import ClientGoneError, invalid
from trtllm_lite.runtime.server.protocol.common import check_refused
from trtllm_lite.runtime.server.protocol.tokens import (
    TOKENIZE_REFUSED,
    DetokenizeRequest,
    TokenizeRequest,
)
from trtllm_lite.runtime.server.responses import json_response
from trtllm_lite.runtime.server.service import Served, Service
from trtllm_lite.runtime.tokenizer import Tokenizer


class TokenRoutes:
    """Text to token ids and back, off the event loop. Errors are ApiError and RequestError."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """The ids that a prompt or a conversation becomes."""
        raw = await self._read(request)
        check_refused(raw, TOKENIZE_REFUSED)
        body = TokenizeRequest.parse(raw)
        served = self._service.resolve(body.model)
        given = [x for x in (body.prompt, body.content, body.messages) if x is not None]
        if len(given) != 1:
            raise invalid("prompt: give one of prompt, content and messages", "prompt")
        if body.continue_final_message and body.messages is None:
            name = "continue_final_message"
            raise invalid(f"{name}: allowed only with messages", name)
        room = served.llm.config.max_sequence_tokens
        check_size("prompt", given[0], self._service.config.limits, room)
        return json_response(await off_loop(lambda: _tokenize(served, body)))

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        body = DetokenizeRequest.parse(await self._read(request))
        served = self._service.resolve(body.model)
        tokenizer = served.llm.tokenizer
        bad = next((i for i in body.tokens if i >= tokenizer.vocab_size), None)
        if bad is not None:
            allowed = f"allowed: ids below {tokenizer.vocab_size}"
            raise invalid(f"tokens: got {bad}; {allowed}", "tokens")
        text = await off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return json_response({"prompt": text})

    async def _read(self, request: Request) -> dict[str, Any]:
        try:
            return await read_object(request.scope, request.receive, self._service.config.limits)
        except ClientGoneError:
            raise invalid("the client left") from None


def _tokenize(served: Served, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = served.llm.tokenizer
    ids = _encode(tokenizer, body)
    made: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": served.llm.config.max_sequence_tokens,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        made["token_strs"] = [tokenizer.token_name(i) for i in ids]
    return made


def _encode(tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        text = body.prompt if body.prompt is not None else body.content or ""
        return tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
    options = chat_options(body)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    text = tokenizer.apply_chat_template(
        body.messages,
        tools=tools or None,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        **options.template,
    )
    return tokenizer.encode(text, add_special_tokens=body.add_special_tokens is True)
