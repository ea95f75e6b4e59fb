"""The read-answer loop of `chat`: input lines, commands that begin with a slash, interrupts."""

import sys
from collections.abc import Callable
from contextlib import closing

from trtllm_lite.runtime.errors import ContextLengthError, EngineDeadError, TrtllmLiteError
from trtllm_lite.tools.chat_session import Conversation
from trtllm_lite.tools.console import Console, Table
from trtllm_lite.tools.metrics import request_line

PROMPT, MORE = "> ", ". "
HELP = (
    ("/reset", "forget the conversation"),
    ("/system TEXT", "set the system message and begin anew (no TEXT: none)"),
    ("/stats", "tokens, context and times so far"),
    ("/help", "this list"),
    ("/exit", "leave (also Ctrl-D)"),
    ("line\\", "a backslash at the end continues on the next line"),
    ("Ctrl-C", "stop the answer; twice at the prompt: leave"),
)


class Reader:
    """Whole messages from stdin: with prompt, editing and history on a terminal, else bare lines.

    `ask` shows its argument, returns a line without its end, and raises EOFError at the end.
    """

    def __init__(self, terminal: bool, ask: Callable[[str], str] | None = None) -> None:
        self.terminal = terminal
        self._ask = ask or (_input if terminal else _bare_line)
        if terminal:
            _load_readline()

    def message(self, prompt: str = PROMPT) -> str:
        """One message; lines that end in a backslash are joined to the next one."""
        lines: list[str] = []
        while True:
            line = self._ask(prompt if not lines else MORE)
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])


class Repl:
    """Runs a conversation until the input ends. Not a terminal: answers only, one a turn."""

    def __init__(self, console: Console, conversation: Conversation, reader: Reader) -> None:
        self._console = console
        self._conversation = conversation
        self._reader = reader
        self._failed = False

    def run(self) -> bool:
        """Returns False when some turn failed and nobody was there to see it."""
        if self._reader.terminal:
            self._console.info("/help lists the commands; Ctrl-D leaves.", dim=True)
        while (text := self._next_message()) is not None:
            if text.startswith("/"):
                if not self._command(text):
                    break
            elif text.strip():
                self._answer(text)
        return self._reader.terminal or not self._failed

    def _next_message(self) -> str | None:
        """The next message; None at the end of the input, or after two Ctrl-C in a row."""
        interrupted = False
        while True:
            try:
                return self._reader.message()
            except EOFError:
                if self._reader.terminal:
                    self._console.info("")
                return None
            except KeyboardInterrupt:
                if interrupted or not self._reader.terminal:
                    self._console.info("")
                    return None
                interrupted = True
                self._console.info("\n(Ctrl-C again, or Ctrl-D, to leave)", dim=True)

    def _answer(self, text: str) -> None:
        try:
            with closing(self._conversation.ask(text)) as pieces:
                for piece in pieces:
                    self._console.stream(piece)
            self._console.stream("\n")
        except KeyboardInterrupt:
            self._console.stream("\n")
            self._console.info("(stopped)", dim=True)
        except EngineDeadError:
            raise
        except TrtllmLiteError as error:
            self._refused(error)
            return
        self._after()

    def _refused(self, error: TrtllmLiteError) -> None:
        self._failed = True
        if self._conversation.last is not None:
            self._console.stream("\n")
        self._console.error(str(error))
        if isinstance(error, ContextLengthError):
            self._console.info("The conversation is too long now: /reset begins a new one.")

    def _after(self) -> None:
        if self._conversation.cut_by_context:
            self._console.warn("cut: the context is full; /reset begins a new conversation")
        last = self._conversation.last
        if self._reader.terminal and last is not None:
            self._console.info(request_line(last), dim=True)

    def _command(self, text: str) -> bool:
        """Obey a slash command; False is the end."""
        name, _, rest = text.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._conversation.reset()
            self._console.info("(new conversation)", dim=True)
        elif name == "/system":
            self._conversation.set_system(rest.strip())
            self._console.info("(system message set; new conversation)", dim=True)
        elif name == "/stats":
            self._show(("figure", "value"), self._conversation.stats())
        elif name == "/help":
            self._show(("command", "what it does"), list(HELP))
        else:
            self._failed = True
            self._console.error(f"no command {name}; /help lists them")
        return True

    def _show(self, columns: tuple[str, str], rows: list[tuple[str, str]]) -> None:
        self._console.table(Table("", columns, tuple(rows)))


def _input(prompt: str) -> str:
    return input(prompt)


def _bare_line(_: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _load_readline() -> None:
    """Importing it gives `input` line editing and history, where the platform has it."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
