"""How a conversation's tools and reasoning are handled: what the template and the grammar get, and
what reads the answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.server.errors import ApiError, invalid
from trtllm_lite.runtime.server.parsers.formats import ToolFormat
from trtllm_lite.runtime.server.parsers.output_parser import OutputParser
from trtllm_lite.runtime.server.parsers.reasoning import ReasoningSplitter, opens_reasoning
from trtllm_lite.runtime.server.parsers.tool_grammar import FunctionTool, Thought, tool_grammar
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.protocol.common import unsupported
from trtllm_lite.runtime.server.protocol.tools import NamedChoice
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.tokenizer import Tokenizer

NO_FORM = (
    "the model's chat template shows no form of tool calls that is known here; the option "
    "--tool-call-parser sets one, but is of no help where the template takes no tools"
)


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request. `forced`: the answer is calls and nothing else; `name`: of that
    tool alone. `template` is what the chat template gets."""

    form: ToolFormat
    functions: tuple[FunctionTool, ...]
    template: tuple[dict[str, Any], ...]
    forced: bool = False
    name: str | None = None
    parallel: bool = True

    def grammar(self, tokenizer: Tokenizer, thought: Thought) -> GrammarSpec:
        """Of a forced answer. Raises RequestError."""
        return tool_grammar(
            self.form.form,
            self.functions,
            name=self.name,
            parallel=self.parallel,
            special_tokens=tokenizer.special_tokens,
            thought=thought,
        )


@dataclass(frozen=True)
class Reading:
    """How the text of an answer is read: None in both is plain content."""

    tools: ToolUse | None = None
    reasoning: bool = False
    opened: Callable[[str], bool] = field(default=opens_reasoning)

    @property
    def is_plain(self) -> bool:
        return self.tools is None and not self.reasoning

    def parser(self, prompt: str | None) -> OutputParser:
        """For one choice. `prompt`: as the template rendered it."""
        reasoning = None
        if self.reasoning:
            reasoning = ReasoningSplitter(opened=self.opened(prompt or ""))
        if self.tools is None:
            return OutputParser(reasoning)
        names = [function.name for function in self.tools.functions]
        return OutputParser(reasoning, self.tools.form.parser(names, eager=self.tools.forced))


def tool_use(body: ChatRequest, card: ModelCard) -> ToolUse | None:
    """The request's tools, None where none may be called. Raises ApiError, RequestError."""
    if body.tools is None:
        _check_no_choice(body)
        return None
    functions = tuple(_function(t.function.name, t.function.parameters) for t in body.tools)
    _check_names(functions)
    if body.tool_choice == "none":
        return None
    if card.tool_format is None:
        raise unsupported("tools", NO_FORM)
    choice = body.tool_choice
    name = choice.function.name if isinstance(choice, NamedChoice) else None
    if name is not None and name not in {function.name for function in functions}:
        raise invalid(f"tool_choice: there is no tool {name!r}", "tool_choice")
    return ToolUse(
        form=card.tool_format,
        functions=functions,
        template=tuple(tool.model_dump(exclude_unset=True) for tool in body.tools),
        forced=choice == "required" or name is not None,
        name=name,
        parallel=body.parallel_tool_calls is not False,
    )


def _function(name: str, parameters: dict[str, Any] | None) -> FunctionTool:
    return FunctionTool(name, parameters)


def _check_names(functions: tuple[FunctionTool, ...]) -> None:
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise invalid("tools: two functions have the same name", "tools")


def _check_no_choice(body: ChatRequest) -> None:
    for name in ("tool_choice", "parallel_tool_calls"):
        if getattr(body, name) not in (None, "none"):
            raise _only_with_tools(name)


def _only_with_tools(name: str) -> ApiError:
    return invalid(f"{name}: allowed only with tools", name)
