"""chat: the conversation that the model sees, commands, interrupts, and pipes."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.runtime.errors import EngineDeadError, StepError
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.tools.chat_repl import MORE, PROMPT, Reader, Repl
from trtllm_lite.tools.chat_session import Conversation
from trtllm_lite.tools.cli import cli
from trtllm_lite.tools.console import Console, Settings

ScriptedLLM = Any  # of conftest.py, which cannot be imported


class Typist:
    """Types lines at the prompt; an exception among them is raised there."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.prompts: list[str] = []
        self._lines = list(lines)

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def piped(stdin: str, *args: str) -> Result:
    return CliRunner().invoke(cli, ["chat", "b", *args], input=stdin)


def at_terminal(llm: ScriptedLLM, *lines: str | BaseException) -> Typist:
    """Run the loop as on a terminal."""
    typist = Typist(*lines)
    conversation = Conversation(llm, SamplingParams(max_tokens=None))
    assert Repl(Console(Settings()), conversation, Reader(True, typist)).run()
    return typist


def test_a_pipe_gets_answers_only_one_line_a_turn(scripted_llm: ScriptedLLM) -> None:
    result = piped("one\n\ntwo\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("<one>\n<two>\n", "", 0)


def test_each_turn_sees_the_ones_before(scripted_llm: ScriptedLLM) -> None:
    piped("one\ntwo\n", "--system", "be kind")
    start = "system: be kind\nuser: one\n"
    assert scripted_llm.prompts == [start, f"{start}assistant: <one>\nuser: two\n"]


def test_an_answer_may_fill_the_context_unless_limited(scripted_llm: ScriptedLLM) -> None:
    piped("x\n")
    piped("x\n", "--max-tokens", "9", "--temperature", "0")
    assert [p.max_tokens for p in scripted_llm.params] == [None, 9]
    assert scripted_llm.params[1].temperature == 0
    assert scripted_llm.opened[0]["max_num_seqs"] == 1


def test_reset_and_system_begin_anew(scripted_llm: ScriptedLLM) -> None:
    piped("a\n/reset\nb\n/system be brief\nc\n/system\nd\n")
    assert scripted_llm.prompts == [
        *("user: a\n", "user: b\n", "system: be brief\nuser: c\n", "user: d\n"),
    ]


def test_exit_ends_at_once(scripted_llm: ScriptedLLM) -> None:
    piped("a\n/exit\nb\n")
    assert scripted_llm.prompts == ["user: a\n"]


def test_an_unknown_command_is_told_and_fails_a_pipe(scripted_llm: ScriptedLLM) -> None:
    result = piped("/rest\na\n")
    assert "error: no command /rest; /help lists them" in result.stderr
    assert (result.stdout, result.exit_code) == ("<a>\n", 1)


def test_help_and_stats_are_tables(scripted_llm: ScriptedLLM) -> None:
    result = piped("/help\nabc\n/stats\n")
    assert "/system TEXT" in result.stdout
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "turns 1" in rows
    assert "context 15 of 1000 tokens" in rows
    assert "prompt tokens 10 (3 from the prefix cache)" in rows
    assert "new tokens 5 in 1.50 s" in rows
    assert "last TTFT 500.0 ms" in rows


@pytest.mark.parametrize("stdin", ["one\\\ntwo\n", "one\\\ntwo"])
def test_a_backslash_continues_the_message(scripted_llm: ScriptedLLM, stdin: str) -> None:
    piped(stdin)
    assert scripted_llm.prompts == ["user: one\ntwo\n"]


def test_a_terminal_shows_prompts_and_figures(
    scripted_llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    typist = at_terminal(scripted_llm, "a\\", "b", "c")
    assert typist.prompts == [PROMPT, MORE, PROMPT, PROMPT]
    captured = capsys.readouterr()
    assert captured.out == "<b>\n<c>\n"
    assert "/help lists the commands" in captured.err
    assert captured.err.count("TTFT 500.0 ms") == 2


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(
    scripted_llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted_llm.script = lambda prompt: ["par", "t", KeyboardInterrupt(), "never"]
    at_terminal(scripted_llm, "a", "b")
    assert scripted_llm.aborted == 2
    assert scripted_llm.prompts[1] == "user: a\nassistant: part\nuser: b\n"
    captured = capsys.readouterr()
    assert captured.out == "part\npart\n"
    assert "(stopped)" in captured.err


def test_an_interrupt_before_any_text_leaves_no_trace(scripted_llm: ScriptedLLM) -> None:
    scripted_llm.script = lambda prompt: [KeyboardInterrupt()]
    at_terminal(scripted_llm, "a", "b")
    assert scripted_llm.prompts == ["user: a\n", "user: b\n"]


@pytest.mark.parametrize(
    ("lines", "turns"),
    [
        ([KeyboardInterrupt(), KeyboardInterrupt(), "late"], 0),
        ([KeyboardInterrupt(), "a", KeyboardInterrupt(), "b"], 2),
        (["a", KeyboardInterrupt(), KeyboardInterrupt(), "late"], 1),
    ],
)
def test_two_interrupts_in_a_row_at_the_prompt_leave(
    scripted_llm: ScriptedLLM, lines: list[str | BaseException], turns: int
) -> None:
    at_terminal(scripted_llm, *lines)
    assert len(scripted_llm.prompts) == turns


def test_a_conversation_that_is_too_long_suggests_reset(scripted_llm: ScriptedLLM) -> None:
    scripted_llm.max_model_len = 30
    result = piped("a\n" + "x" * 40 + "\nb\n")
    assert result.exit_code == 1
    assert "maximum context length is 30" in result.stderr
    assert "/reset begins a new one" in result.stderr
    assert scripted_llm.prompts[2] == "user: a\nassistant: <a>\nuser: b\n"


def test_an_answer_cut_by_the_context_suggests_reset(scripted_llm: ScriptedLLM) -> None:
    scripted_llm.max_model_len = 10
    result = piped("a\n")
    assert "warning: cut: the context is full; /reset" in result.stderr


def test_a_failing_step_ends_the_turn_only(scripted_llm: ScriptedLLM) -> None:
    scripted_llm.step_error = "the step broke"
    result = piped("a\nb\n")
    assert result.stderr == "error: the step broke\nerror: the step broke\n"
    assert (result.stdout, result.exit_code) == ("<a>\n<b>\n", 1)


@pytest.mark.parametrize(("error", "turns"), [(StepError("s"), 2), (EngineDeadError("d"), 1)])
def test_only_a_dead_engine_ends_the_chat(
    scripted_llm: ScriptedLLM, error: BaseException, turns: int
) -> None:
    scripted_llm.script = lambda prompt: [error]
    result = piped("a\nb\n")
    assert len(scripted_llm.prompts) == turns
    assert result.exit_code == 1


def test_a_bundle_without_a_template_is_refused(scripted_llm: ScriptedLLM) -> None:
    scripted_llm.tokenizer.has_chat_template = False
    result = piped("a\n")
    assert result.exit_code == 2
    assert "has no chat template; use generate" in result.stderr


def test_closing_the_answer_early_stops_the_request(scripted_llm: ScriptedLLM) -> None:
    conversation = Conversation(scripted_llm, SamplingParams())
    pieces = conversation.ask("a")
    assert next(pieces) == "<"
    pieces.close()
    assert scripted_llm.aborted == 1
    assert conversation.messages[-1] == {"role": "assistant", "content": "<"}


def test_totals_add_up(scripted_llm: ScriptedLLM) -> None:
    conversation = Conversation(scripted_llm, SamplingParams())
    for text in ("a", "bb"):
        assert "".join(conversation.ask(text)) == f"<{text}>"
    totals = conversation.totals
    prompts: Callable[[str], int] = len
    assert totals.prompt_tokens == sum(map(prompts, scripted_llm.prompts))
    assert (totals.turns, totals.new_tokens, totals.cached_tokens) == (2, 7, 6)
    assert totals.seconds == 3.0
