"""The process that renders a chat template: `python -m` this module.

One line of JSON in, one line out. The first line is the template and its limits, every further one
a conversation. The process takes its own memory and its right to write files away before it looks
at the template, and an alarm ends it where a render does not come to an end. It ends with its
input, and so with whoever started it.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from trtllm_lite.runtime.chat_template import ChatTemplate
from trtllm_lite.runtime.errors import BundleError, RequestError

COMPILE_SECONDS = 60.0
ALARM_SECONDS = 2.0
"""What a render may take beyond the budget that the template itself counts."""


@dataclass(frozen=True)
class Setup:
    """The first line. seconds: of one render. memory: bytes of address space."""

    source: str
    special_tokens: dict[str, str]
    seconds: float
    memory: int


@dataclass(frozen=True)
class Question:
    """A conversation, as `ChatTemplate.render` takes it. `extra`: further names."""

    messages: list[dict[str, Any]]
    tools: Any
    add_generation_prompt: Any
    continue_final_message: Any
    extra: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The text, or the refusal: `param` and `message` of a BundleError or a RequestError. The text
    for a `Setup` is the names of the template's variables, with blanks between them."""

    text: str | None = None
    param: str = ""
    message: str = ""


def line_of(value: Setup | Question | Answer) -> bytes:
    """As it goes over the pipe. Raises ValueError for an integer of thousands of digits."""
    return json.dumps(asdict(value)).encode("ascii") + b"\n"


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer lines until there are no more. A template that is refused is the only answer."""
    first = source.readline()
    if not first:
        return
    setup = Setup(**json.loads(first))
    limit_process(setup.memory)
    try:
        with _alarm(COMPILE_SECONDS):
            template = ChatTemplate(setup.source, setup.special_tokens, seconds=setup.seconds)
    except BundleError as error:
        _send(sink, _refusal(error.field, error))
        return
    _send(sink, Answer(text=" ".join(sorted(template.variables))))
    for line in source:
        with _alarm(setup.seconds + ALARM_SECONDS):
            answer = _answer(template, line)
        _send(sink, answer)


def limit_process(memory: int) -> None:
    """Address space of `memory` bytes from now on, no files written, no core dumps."""
    if sys.platform == "win32":
        return
    import resource

    limits = (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, wanted in limits:
        _, hard = resource.getrlimit(kind)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # A system without one of the limits still has the others, and the parent's clock.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))


def _answer(template: ChatTemplate, line: bytes) -> Answer:
    try:
        asked = Question(**json.loads(line))
        text = template.render(
            asked.messages,
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            **asked.extra,
        )
    except RequestError as error:
        return _refusal(error.param, error)
    except MemoryError:
        return Answer(param="messages", message="the conversation needs more memory than allowed")
    return Answer(text)


def _refusal(param: str, error: BundleError | RequestError) -> Answer:
    return Answer(param=param, message=str(error).removeprefix(f"{param}: "))


def _send(sink: BinaryIO, answer: Answer) -> None:
    sink.write(line_of(answer))
    sink.flush()


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """The system ends the process after this time, inside of C code too."""
    if sys.platform == "win32":
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
