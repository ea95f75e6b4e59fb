"""What the text of one choice means, as it grows: content, reasoning and tool calls."""

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trtllm_lite.runtime.server.parsers.output_parser import OutputParser
from trtllm_lite.runtime.server.thought_count import count_thought
from trtllm_lite.runtime.server.tool_calls import Reading


class AnswerReader:
    """Reads one choice, either as a whole or result by result. Without parallel calls the first
    one counts."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._parser: OutputParser | None = None
        self.has_thought = False
        """Whether the text so far holds reasoning."""

    @property
    def has_calls(self) -> bool:
        """Whether the text so far calls a tool."""
        return self._parser is not None and self._parser.num_calls > 0

    def thought_tokens(self, llm: AsyncLLM, choice: CompletionOutput) -> int:
        """How many tokens of a choice that has been read were reasoning."""
        if not self.has_thought:
            return 0
        return count_thought(llm.tokenizer, choice.token_ids, choice.text)

    def whole(self, output: RequestOutput, choice: CompletionOutput) -> list[Event]:
        """All of a choice that has ended."""
        return self._read(output, choice.text, ended=True)

    def new(self, output: RequestOutput, choice: CompletionOutput) -> list[Event]:
        """What a choice has more than in the result before."""
        return self._read(output, choice.delta, ended=choice.finish_reason is not None)

    def _read(self, output: RequestOutput, text: str, *, ended: bool) -> list[Event]:
        if self._reading.is_plain:
            return [ContentDelta(text)] if text else []
        if self._parser is None:
            self._parser = self._reading.parser(output.prompt)
        events = self._parser.feed(text)
        if ended:
            events = [*events, *self._parser.finish()]
        self.has_thought |= any(isinstance(event, ReasoningDelta) for event in events)
        return [event for event in events if self._is_wanted(event)]

    def _is_wanted(self, event: Event) -> bool:
        tools = self._reading.tools
        if tools is None or not isinstance(event, ToolCallStart | ToolCallArguments):
            return True
        return tools.parallel or event.index == 0
