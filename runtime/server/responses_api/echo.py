"""What a response repeats of its request, with the values that were used."""

from typing import Any

from trtllm_lite.runtime.server.conversation import Conversation
from trtllm_lite.runtime.server.protocol.responses import (
    FunctionChoice,
    ResponsesRequest,
    ResponseTool,
)


def echoed(body: ResponsesRequest, talk: Conversation) -> dict[str, Any]:
    """The fields of a response object that do not change while it is made."""
    params = talk.ask.params
    return {
        "model": talk.served.name,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "text": _text(body),
        "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        **_FIXED,
    }


_FIXED = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


def _text(body: ResponsesRequest) -> dict[str, Any]:
    form = None if body.text is None else body.text.format
    shown: dict[str, Any] = {"type": "text"}
    if form is not None:
        shown = form.model_dump(by_alias=True, exclude_none=True)
    return {"format": shown}


def _tool(tool: ResponseTool) -> dict[str, Any]:
    """All fields: clients' types have none that may be missing."""
    return tool.model_dump()


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto"
