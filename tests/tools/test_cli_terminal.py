"""chat on a real (pseudo-)terminal: prompt, streamed answer, Ctrl-C, Ctrl-D."""

import os
import pty
import select
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Endless, slow answers: only Ctrl-C ends them.
CHILD = """
import itertools, runpy, sys, time
from types import ModuleType
llm = runpy.run_path({conftest!r})["ScriptedLLM"](None)
class Slow(list):
    def __iter__(self):
        for i in itertools.count():
            time.sleep(0.02)
            yield f"word{{i}} "
llm.script = lambda prompt: Slow("xx")
module = ModuleType("trtllm_lite.runtime.llm")
module.LLM = llm
sys.modules[module.__name__] = module
from trtllm_lite.tools.cli import cli
cli.main(["chat", "bundle"])
"""
GIVE_UP = 30.0


class Screen:
    """The other end of a program's terminal."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd
        self.text = ""
        self._seen = 0

    def wait_for_prompt(self) -> None:
        """Wait until the program edits a line: keys typed before that may get lost."""
        self.wait_for("> ")
        for _ in range(int(GIVE_UP / 0.05)):
            if not termios.tcgetattr(self._fd)[3] & termios.ICANON:
                break
            time.sleep(0.05)
        # readline checks for signals, then waits for keys; one in between would be seen late.
        time.sleep(0.1)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str) -> None:
        """Read until `text` appears after what was waited for before."""
        while text not in self.text[self._seen :]:
            ready, _, _ = select.select([self._fd], [], [], GIVE_UP)
            assert ready, f"{text!r} never came: {self.text!r}"
            self.text += os.read(self._fd, 4096).decode()
        self._seen = self.text.index(text, self._seen) + len(text)

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def screen() -> Iterator[Screen]:
    conftest = str(Path(__file__).with_name("conftest.py"))
    code = CHILD.format(conftest=conftest)
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", code])
    yield Screen(pid, fd)
    os.close(fd)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(screen: Screen) -> None:
    screen.wait_for_prompt()
    screen.type("hi\n")
    screen.wait_for("word3 ")
    screen.type("\x03")
    screen.wait_for("(stopped)")
    screen.wait_for_prompt()
    screen.type("again\n")
    screen.wait_for("word2 ")
    screen.type("\x03")
    screen.wait_for("(stopped)")
    screen.wait_for_prompt()
    screen.type("\x04")
    assert screen.exit_code() == 0
    assert "Traceback" not in screen.text


def test_two_ctrl_c_at_the_prompt_leave(screen: Screen) -> None:
    screen.wait_for_prompt()
    screen.type("half a line")
    screen.wait_for("half a line")
    time.sleep(0.1)
    screen.type("\x03")
    screen.wait_for("again, or Ctrl-D")
    screen.wait_for_prompt()
    screen.type("\x03")
    assert screen.exit_code() == 0
    assert "Traceback" not in screen.text
