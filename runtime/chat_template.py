"""Render a conversation with the bundle's chat template, which is code that nobody trusts.

The template runs in Jinja's immutable sandbox, with the extensions and helpers that transformers
gives it, and with a budget: loops and calls are counted against a deadline, and operations that
make long texts out of short ones are measured first. What remains: one call of a filter over long
lists (sort, groupby, nested map) is not interrupted, and memory may reach some hundred megabytes.
Who serves renders with `IsolatedTemplate`, in a process of its own with limits from the system.
"""

import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType

import jinja2
import jinja2.meta

from trtllm_lite.runtime.chat_messages import Message, check_messages, plain
from trtllm_lite.runtime.continuation import Continuation
from trtllm_lite.runtime.errors import BundleError, RequestError
from trtllm_lite.runtime.template_cost import MAX_TEXT, Budget, TemplateCostError
from trtllm_lite.runtime.template_sandbox import BUDGET, Refusal, TemplateSandbox

RENDER_SECONDS = 5.0
_RESERVED = frozenset(("messages", "tools", "add_generation_prompt"))
_PROBE = ({"role": "user", "content": "Hello"},)


class ChatTemplate:
    """A compiled chat template. Thread-safe: every render has a budget of its own."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        seconds: float = RENDER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: what the template knows by name, such as `bos_token`. `seconds` is the
        deadline of one render on `clock`; `now` is what `strftime_now` tells.

        Compiles and renders a first conversation. Raises BundleError for a template that is no
        Jinja, reaches for what the sandbox forbids, or runs over its budget; one that only refuses
        that conversation is taken.
        """
        self._takes_tool_calls = "tool_calls" in source
        self._special_tokens = MappingProxyType(dict(special_tokens))
        self._seconds, self._clock = seconds, clock
        environment = TemplateSandbox(now)
        try:
            tree = environment.parse(source)
            self._names = jinja2.meta.find_undeclared_variables(tree)
            self._template = environment.from_string(tree)
        # The source is foreign code, which may break the compiler in any way.
        except Exception as error:
            raise BundleError("chat_template", f"it cannot be compiled: {_brief(error)}") from error
        self._probe()

    @property
    def variables(self) -> frozenset[str]:
        """Names of further values that the template uses."""
        return frozenset(self._names - _RESERVED - self._special_tokens.keys())

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """The prompt text of a conversation.

        `messages` are checked by `check_messages`. `tools` is a list of JSON schemas of functions,
        or None. `continue_final_message`, which needs add_generation_prompt False: the text ends
        where the content of the last message does, an assistant's. Further names go to the
        template, if it uses them. Raises RequestError for what is malformed, what the template
        does not use, and what the template refuses.
        """
        checked = self._check_messages(messages)
        start = _check_flag("add_generation_prompt", add_generation_prompt)
        goes_on = None
        if _check_flag("continue_final_message", continue_final_message):
            goes_on = Continuation.of(checked, starts_answer=start)
        values: dict[str, object] = {
            "messages": checked,
            "tools": self._check_tools(tools),
            "add_generation_prompt": start,
            "documents": None,
            **{name: self._check_extra(name, value) for name, value in kwargs.items()},
        }
        try:
            text = self._run(values)
        # A template fails in whatever way its author did not think of.
        except Exception as error:
            raise RequestError("messages", f"the chat template {_reason(error)}") from error
        return text if goes_on is None else goes_on.end_of(text)

    def _probe(self) -> None:
        values: dict[str, object] = {"messages": list(_PROBE), "tools": None, "documents": None}
        values["add_generation_prompt"] = True
        try:
            self._run(values)
        except (TemplateCostError, jinja2.exceptions.SecurityError, MemoryError) as error:
            raise BundleError("chat_template", f"it {_reason(error)}") from error
        except Exception:
            # Some templates want a system message, tools or text parts: requests may bring them.
            return

    def _run(self, values: dict[str, object]) -> str:
        budget = Budget(self._seconds, self._clock, (jinja2.Undefined,))
        pieces, size = [], 0
        for piece in self._template.generate({**self._special_tokens, **values, BUDGET: budget}):
            budget.step()
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateCostError(f"makes a prompt of over {MAX_TEXT} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _check_messages(self, messages: object) -> list[Message]:
        checked = check_messages(messages)
        if not self._takes_tool_calls and any(m.get("tool_calls") for m in checked):
            raise RequestError("messages", "the bundle's chat template does not use tool_calls")
        return checked

    def _check_tools(self, tools: object) -> object:
        if tools is None or tools == []:
            return None
        if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
            raise RequestError("tools", "allowed: a list of JSON schemas of functions, or None")
        if "tools" not in self._names:
            raise RequestError("tools", "the bundle's chat template does not use tools")
        return plain("tools", "tools", tools)

    def _check_extra(self, name: str, value: object) -> object:
        if name in ("chat_template", "tokenize"):
            raise RequestError(name, "not allowed: the bundle's own chat template gives the text")
        if name not in self.variables:
            allowed = ", ".join(sorted(self.variables)) or "nothing further"
            raise RequestError(name, f"the chat template does not use it; allowed: {allowed}")
        return plain(name, name, value)


def _check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(name, f"got {value!r}; allowed: True or False")
    return value


def _reason(error: Exception) -> str:
    """Completes "the chat template ..."."""
    if isinstance(error, TemplateCostError):
        return str(error)
    if isinstance(error, Refusal):
        return f"refused: {_brief(error)}"
    if isinstance(error, jinja2.exceptions.SecurityError):
        return f"reaches for what is forbidden: {_brief(error)}"
    if isinstance(error, MemoryError):
        return "needs more memory than it may have"
    return f"failed: {type(error).__name__}: {_brief(error)}"


def _brief(error: Exception) -> str:
    """One line, without memory addresses."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(str(error)[:2000].split()))[:300]
