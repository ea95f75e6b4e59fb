"""GET /v1/capabilities: every request field, from the models that check them."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.convert import COMPLETION_TOKENS
from trtllm_lite.runtime.server.protocol.chat import CHAT_REFUSED, ChatRequest
from trtllm_lite.runtime.server.protocol.common import NO_EFFECT, REFUSED, Refused
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
from trtllm_lite.runtime.server.protocol.strict import Strict
from trtllm_lite.runtime.server.responses import json_response
from trtllm_lite.runtime.server.service import Service
from trtllm_lite.runtime.server.tool_calls import NO_FORM

_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_RANGE = (
    ("minimum", "minimum"),
    ("maximum", "maximum"),
    ("exclusiveMinimum", "above"),
    ("exclusiveMaximum", "below"),
    ("minItems", "min_items"),
    ("maxLength", "max_length"),
)


class CapabilityRoute:
    """What each field of a request does here."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def show(self, request: Request) -> Response:
        """By endpoint and field: honoured with its range and default, accepted without effect, or
        refused with the reason."""
        served = self._service.resolve(None)
        defaults, tools = served.llm.default_params(), served.card.tool_format is not None
        limits = asdict(self._service.config.limits)
        return json_response(
            {
                "object": "capabilities",
                "endpoints": {
                    "/v1/chat/completions": chat_fields(defaults, tools=tools),
                    "/v1/completions": completion_fields(defaults),
                    "/v1/responses": responses_fields(defaults, tools=tools),
                    "/v1/messages": messages_fields(defaults, tools=tools),
                    "/v1/messages/count_tokens": count_fields(tools=tools),
                },
                "unknown_fields": "accepted without effect",
                "limits": {**limits, "max_model_len": served.llm.config.max_sequence_tokens},
            }
        )


def chat_fields(defaults: SamplingParams, *, tools: bool) -> dict[str, dict[str, Any]]:
    """Of /v1/chat/completions. `tools`: whether the model has a form of tool calls."""
    refused = {**REFUSED, **CHAT_REFUSED, **_without_tools(tools=tools)}
    given = {**asdict_defaults(defaults), "logprobs": False, "top_logprobs": 0, "max_tokens": None}
    return field_table(ChatRequest, refused, given)


def responses_fields(defaults: SamplingParams, *, tools: bool) -> dict[str, dict[str, Any]]:
    """Of /v1/responses."""
    refused = {**REFUSED, **RESPONSES_REFUSED, **_without_tools(tools=tools)}
    given = {**asdict_defaults(defaults), "top_logprobs": 0}
    return field_table(ResponsesRequest, refused, given, RESPONSES_NO_EFFECT)


def messages_fields(defaults: SamplingParams, *, tools: bool) -> dict[str, dict[str, Any]]:
    """Of /v1/messages."""
    refused = {**REFUSED, **MESSAGES_REFUSED, **_without_tools(tools=tools)}
    given = {**asdict_defaults(defaults), "max_tokens": None}
    return field_table(MessagesRequest, refused, given, MESSAGES_NO_EFFECT)


def count_fields(*, tools: bool) -> dict[str, dict[str, Any]]:
    """Of /v1/messages/count_tokens."""
    refused = {**REFUSED, **MESSAGES_REFUSED, **_without_tools(tools=tools)}
    return field_table(CountTokensRequest, refused, {}, MESSAGES_NO_EFFECT)


def completion_fields(defaults: SamplingParams) -> dict[str, dict[str, Any]]:
    """Of /v1/completions."""
    given = {**asdict_defaults(defaults), "max_tokens": COMPLETION_TOKENS, "echo": False}
    return field_table(CompletionRequest, {**REFUSED, **COMPLETION_REFUSED}, given)


def asdict_defaults(defaults: SamplingParams) -> dict[str, Any]:
    """The bundle's sampling defaults as JSON data."""
    names = SamplingParams.__dataclass_fields__
    made = {name: getattr(defaults, name) for name in names}
    return {**made, "logit_bias": {str(k): v for k, v in defaults.logit_bias.items()}}


def field_table(
    model: type[Strict],
    refused: Mapping[str, Refused],
    defaults: Mapping[str, Any],
    no_effect: Iterable[str] = NO_EFFECT,
) -> dict[str, dict[str, Any]]:
    """A row for every field of `model`, then those without effect, then the refused ones."""
    schema = model.model_json_schema()
    table = {
        name: _honoured(name, spec, defaults)
        for name, spec in schema["properties"].items()
        if name not in refused
    }
    table |= {name: {"status": "no_effect"} for name in no_effect}
    table |= {
        name: {"status": "refused", "reason": entry.reason} for name, entry in refused.items()
    }
    return table


def _without_tools(*, tools: bool) -> dict[str, Refused]:
    return {} if tools else dict.fromkeys(_TOOL_FIELDS, Refused(NO_FORM))


def _honoured(name: str, spec: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in _kinds(spec) if kind.get("type") != "null"]
    row: dict[str, Any] = {"status": "honoured", "default": defaults.get(name)}
    row["types"] = sorted({str(kind.get("type", "object")) for kind in kinds})
    for kind in (spec, *kinds):
        row |= {ours: kind[theirs] for theirs, ours in _RANGE if theirs in kind}
    if "description" in spec:
        row["description"] = spec["description"]
    return row


def _kinds(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The cases of a schema."""
    cases = spec.get("anyOf") or spec.get("oneOf")
    return [spec] if cases is None else [kind for case in cases for kind in _kinds(case)]
