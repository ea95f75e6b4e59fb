"""The table of routes: what each takes and answers. A route of the application that is not here, or
the reverse, fails a test."""

from dataclasses import dataclass

from pydantic import BaseModel

from trtllm_lite.runtime.server import openapi_examples as examples
from trtllm_lite.runtime.server import openapi_facts as facts
from trtllm_lite.runtime.server import openapi_messages as messages
from trtllm_lite.runtime.server import openapi_replies as replies
from trtllm_lite.runtime.server import openapi_responses as responses
from trtllm_lite.runtime.server.openapi_schemas import Body
from trtllm_lite.runtime.server.protocol.chat import CHAT_REFUSED, ChatRequest
from trtllm_lite.runtime.server.protocol.common import NO_EFFECT, REFUSED
from trtllm_lite.runtime.server.protocol.completion import COMPLETION_REFUSED, CompletionRequest
from trtllm_lite.runtime.server.protocol.messages import (
    MESSAGES_NO_EFFECT,
    MESSAGES_REFUSED,
    CountTokensRequest,
    MessagesRequest,
)
from trtllm_lite.runtime.server.protocol.responses import (
    RESPONSES_NO_EFFECT,
    RESPONSES_REFUSED,
    ResponsesRequest,
)
from trtllm_lite.runtime.server.protocol.tokens import (
    TOKENIZE_REFUSED,
    DetokenizeRequest,
    TokenizeRequest,
)

TAGS = {
    "generate": "Text from a model.",
    "tokens": "Text to token ids and back.",
    "models": "What is served.",
    "server": "Probes, metrics and this document.",
}

_DONE = "[DONE]"
_ANY = (400, 401, 431, 500, 503)
_READS = (*_ANY, 404, 408, 413)
_GENERATES = (*_READS, 501)


@dataclass(frozen=True)
class Operation:
    """One route. name: operationId. reply: type of the JSON of a 200; None where that is free.
    media: type of a 200 that is no JSON. events: types of a stream's events, where a request may
    ask for one. others: replies of other statuses, in place of the error object. errors: statuses
    with the error object, which is a `fault`. done: data of the event that ends a stream. ok:
    whether it ever answers 200."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    reply: type[BaseModel] | None = None
    body: Body | None = None
    media: str = "application/json"
    events: tuple[type[BaseModel], ...] = ()
    others: tuple[tuple[int, type[BaseModel]], ...] = ()
    errors: tuple[int, ...] = _ANY
    fault: type[BaseModel] = replies.ErrorReply
    done: str | None = None
    ok: bool = True

    @property
    def answers(self) -> tuple[type[BaseModel], ...]:
        """All types that it answers with."""
        first = () if self.reply is None else (self.reply,)
        return (*first, *self.events, *(model for _, model in self.others), self.fault)


_CHAT = Body(ChatRequest, {**REFUSED, **CHAT_REFUSED}, NO_EFFECT, examples.CHAT)
_COMPLETION = Body(
    CompletionRequest, {**REFUSED, **COMPLETION_REFUSED}, NO_EFFECT, examples.COMPLETION
)
_RESPONSES = Body(
    ResponsesRequest,
    {**REFUSED, **RESPONSES_REFUSED},
    RESPONSES_NO_EFFECT,
    examples.RESPONSES,
)
_MESSAGES = Body(
    MessagesRequest, {**REFUSED, **MESSAGES_REFUSED}, MESSAGES_NO_EFFECT, examples.MESSAGES
)
_COUNT_TOKENS = Body(
    CountTokensRequest, {**REFUSED, **MESSAGES_REFUSED}, MESSAGES_NO_EFFECT, examples.COUNT_TOKENS
)
_TOKENIZE = Body(TokenizeRequest, TOKENIZE_REFUSED, (), examples.TOKENIZE)
_DETOKENIZE = Body(DetokenizeRequest, examples=examples.DETOKENIZE)
_UNHEALTHY = ((503, facts.UnhealthyReply),)
_PROBED = (400, 431, 500)


def _not_stored(method: str, name: str) -> Operation:
    return Operation(
        method,
        "/v1/responses/{id}",
        name,
        "generate",
        "Nothing: responses are not stored",
        errors=(*_ANY, 404),
        ok=False,
    )


def _health(path: str, name: str) -> Operation:
    summary = "Whether requests are taken"
    return Operation(
        "GET", path, name, "server", summary, facts.HealthReply, others=_UNHEALTHY, errors=_PROBED
    )


OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "createChatCompletion",
        "generate",
        "Answer a conversation",
        replies.ChatCompletion,
        _CHAT,
        events=(replies.ChatCompletionChunk,),
        done=_DONE,
        errors=_GENERATES,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "createCompletion",
        "generate",
        "Continue or score prompts",
        replies.Completion,
        _COMPLETION,
        events=(replies.CompletionChunk,),
        done=_DONE,
        errors=_GENERATES,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "createResponse",
        "generate",
        "Answer an input, in the form of OpenAI's newer API",
        responses.ResponseObject,
        _RESPONSES,
        events=(responses.ResponseEvent,),
        errors=_GENERATES,
    ),
    _not_stored("GET", "getResponse"),
    _not_stored("POST", "changeResponse"),
    _not_stored("DELETE", "deleteResponse"),
    Operation(
        "POST",
        "/v1/messages",
        "createMessage",
        "generate",
        "Answer a conversation, in the form of Anthropic's API",
        messages.MessageObject,
        _MESSAGES,
        events=(messages.MessageEvent,),
        errors=_GENERATES,
        fault=messages.MessagesError,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "countTokens",
        "tokens",
        "How many tokens a conversation has",
        messages.TokenCount,
        _COUNT_TOKENS,
        errors=_READS,
        fault=messages.MessagesError,
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        "tokens",
        "Token ids of a text or a conversation",
        facts.TokenizeReply,
        _TOKENIZE,
        errors=_READS,
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        "tokens",
        "Text of token ids",
        facts.DetokenizeReply,
        _DETOKENIZE,
        errors=_READS,
    ),
    Operation("GET", "/v1/models", "listModels", "models", "All served models", facts.ModelList),
    Operation(
        "GET",
        "/v1/models/{id}",
        "retrieveModel",
        "models",
        "One served model",
        facts.ModelObject,
        errors=(*_ANY, 404),
    ),
    Operation(
        "GET",
        "/v1/capabilities",
        "capabilities",
        "models",
        "What every field of a request does here",
        facts.Capabilities,
    ),
    Operation(
        "GET",
        "/live",
        "live",
        "server",
        "Whether the process should be left running",
        facts.LiveReply,
        others=((503, facts.LiveReply),),
        errors=_PROBED,
    ),
    _health("/health", "health"),
    _health("/v1/health", "healthOfV1"),
    _health("/ready", "ready"),
    Operation("GET", "/version", "version", "server", "Versions", facts.VersionReply),
    Operation("GET", "/metrics", "metrics", "server", "Prometheus metrics", media="text/plain"),
    Operation("GET", "/openapi.json", "openapi", "server", "This document"),
)
