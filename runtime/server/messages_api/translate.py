"""A checked body of /v1/messages in the form of /v1/chat/completions."""

from collections.abc import Iterable, Sequence, Set
from itertools import groupby
from typing import Any

from trtllm_lite.runtime.server.conversation import shared_fields
from trtllm_lite.runtime.server.errors import ApiError, invalid
from trtllm_lite.runtime.server.messages_api.thinking import thinking_variables
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.protocol.message_blocks import (
    Block,
    Content,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from trtllm_lite.runtime.server.protocol.messages import (
    MessagesRequest,
    MessageTool,
    PromptFields,
)

Message = dict[str, Any]


def prompt_request(body: PromptFields, known: Set[str], *, reasons: bool) -> ChatRequest:
    """The prompt of a body alone. `known` and `reasons` are the model's: see
    `thinking_variables`. Raises ApiError."""
    return ChatRequest.parse(_prompt(body, known, reasons=reasons))


def chat_request(body: MessagesRequest, known: Set[str], *, reasons: bool) -> ChatRequest:
    """The conversation that a body asks to continue. Raises ApiError."""
    return ChatRequest.parse(
        {
            **shared_fields(body),
            **_prompt(body, known, reasons=reasons),
            "n": 1,
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
        }
    )


def chat_messages(body: PromptFields) -> list[Message]:
    """Messages as chat templates know them. Neighbours of the same role are one turn. Raises
    ApiError."""
    made: list[Message] = []
    if body.system:
        made.append({"role": "system", "content": _joined(body.system)})
    turns = _Turns()
    for role, messages in groupby(body.messages, lambda message: message.role):
        blocks = [block for message in messages for block in _blocks(message.content)]
        made += turns.of(role, blocks)
    return made


class _Turns:
    """Puts blocks together; knows the calls so far by their id."""

    def __init__(self) -> None:
        self._calls: dict[str, str] = {}

    def of(self, role: str, blocks: Sequence[Block]) -> list[Message]:
        """Messages of one role."""
        if role == "assistant":
            return [self._assistant(blocks)]
        return self._user(blocks) if role == "user" else [_system(blocks)]

    def _assistant(self, blocks: Sequence[Block]) -> Message:
        if any(isinstance(block, ToolResultBlock) for block in blocks):
            raise _misplaced("tool_result", "user")
        texts = [block for block in blocks if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        calls = [self._call(block) for block in blocks if isinstance(block, ToolUseBlock)]
        message: Message = {"role": "assistant", "content": _joined(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        return {**message, "tool_calls": calls} if calls else message

    def _user(self, blocks: Sequence[Block]) -> list[Message]:
        """A message for each result of a tool, and for the text between them."""
        made: list[Message] = []
        for is_text, part in groupby(blocks, lambda block: isinstance(block, TextBlock)):
            if is_text:
                made.append({"role": "user", "content": _joined(part)})
            else:
                made += [self._result(block) for block in part]
        return made or [{"role": "user", "content": ""}]

    def _call(self, block: ToolUseBlock) -> Message:
        self._calls[block.id] = block.name
        function = {"name": block.name, "arguments": block.input}
        return {"id": block.id, "type": "function", "function": function}

    def _result(self, block: Block) -> Message:
        if not isinstance(block, ToolResultBlock):
            raise _misplaced(block.type, "assistant")
        name = self._calls.get(block.tool_use_id)
        if name is None:
            got = f"messages: got a tool_result for {block.tool_use_id[:60]!r}"
            raise invalid(f"{got}; allowed: the id of a tool_use before it", "messages")
        text = _joined(block.content or "")
        made = {"role": "tool", "tool_call_id": block.tool_use_id, "name": name}
        return {**made, "content": f"Error: {text}" if block.is_error else text}


def _system(blocks: Sequence[Block]) -> Message:
    for block in blocks:
        if not isinstance(block, TextBlock):
            raise invalid(f"messages: a system message holds a {block.type} block", "messages")
    return {"role": "system", "content": _joined(blocks)}


def _misplaced(kind: str, role: str) -> ApiError:
    return invalid(f"messages: a block of type {kind} belongs to the {role}", "messages")


def _blocks(content: Content) -> Sequence[Block]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _joined(texts: Texts | Iterable[Block]) -> str:
    """As one text. Of other blocks there are none among them."""
    if isinstance(texts, str):
        return texts
    return "\n".join(block.text for block in texts if isinstance(block, TextBlock))


def _prompt(body: PromptFields, known: Set[str], *, reasons: bool) -> dict[str, Any]:
    config = body.output_config
    form = None if config is None else config.format
    return {
        **_tools(body),
        "model": body.model,
        "messages": chat_messages(body),
        "continue_final_message": body.messages[-1].role == "assistant",
        "chat_template_kwargs": thinking_variables(body.thinking, known, reasons=reasons) or None,
        "reasoning_effort": None if config is None else config.effort,
        "response_format": None
        if form is None
        else {"type": "json_schema", "json_schema": {"schema": form.schema_}},
    }


def _tools(body: PromptFields) -> dict[str, Any]:
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type != "none":
            raise invalid("tool_choice: allowed only with tools", "tool_choice")
        return {}
    made: dict[str, Any] = {"tools": [_tool(tool) for tool in body.tools]}
    if choice is None:
        return made
    made["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name: missing; type 'tool' needs it", "tool_choice")
        made["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        made["parallel_tool_calls"] = False
    return made


def _tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
