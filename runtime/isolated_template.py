"""A chat template rendered in processes of its own, with limits from the system.

`ChatTemplate` counts what a template does, but cannot interrupt a single call of a filter, nor
bound all of the memory. Here the system does both: a worker has so much address space and so much
time, and is ended and replaced when it takes more. Conversations and texts go over pipes as JSON.
"""

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from trtllm_lite.runtime.chat_messages import check_messages, plain
from trtllm_lite.runtime.chat_template import RENDER_SECONDS
from trtllm_lite.runtime.errors import BundleError, BusyError, RequestError
from trtllm_lite.runtime.template_process import ProcessLostError, TemplateProcess
from trtllm_lite.runtime.template_worker import Answer, Question, Setup


@dataclass(frozen=True)
class TemplateLimits:
    """Of one template's processes. seconds: of a render by the template's own count; grace: what
    the process gets beyond, for a single call that counts nothing; start: to start and compile.
    memory: bytes of address space of each. processes: at most; the second starts when needed."""

    seconds: float = RENDER_SECONDS
    grace: float = 1.0
    start: float = 60.0
    memory: int = 512 * 2**20
    processes: int = 2


class IsolatedTemplate:
    """Renders what `ChatTemplate` renders, with the same refusals. Thread-safe. The processes end
    with the object, or with this process, however it ends."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        limits: TemplateLimits | None = None,
    ) -> None:
        """Compiles the template in a first process. Raises BundleError for one that cannot be
        used, or that breaks the process; BusyError where the system has no process to give."""
        self._limits = limits = limits or TemplateLimits()
        self._setup = Setup(source, dict(special_tokens), limits.seconds, limits.memory)
        self._slots = threading.BoundedSemaphore(limits.processes)
        self._idle: list[TemplateProcess] = []
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        try:
            process = self._started()
        except ProcessLostError as error:
            raise BundleError("chat_template", f"it {error}") from error
        self.variables = process.variables
        self._idle.append(process)

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """See `ChatTemplate.render`. Raises BusyError too, when all processes are taken for the
        time that a render may take."""
        extra = {name: plain(name, name, value) for name, value in kwargs.items()}
        question = Question(
            messages=check_messages(messages),
            tools=plain("tools", "tools", tools),
            add_generation_prompt=plain(
                "add_generation_prompt", "add_generation_prompt", add_generation_prompt
            ),
            continue_final_message=plain(
                "continue_final_message", "continue_final_message", continue_final_message
            ),
            extra=extra,
        )
        if not self._slots.acquire(timeout=self._limits.seconds):
            raise BusyError("every process that renders the chat template is taken")
        try:
            answer = self._ask(question)
        finally:
            self._slots.release()
        if answer.text is None:
            raise RequestError(answer.param, answer.message)
        return answer.text

    def _ask(self, question: Question) -> Answer:
        process = self._take()
        try:
            answer = process.ask(question, self._limits.seconds + self._limits.grace)
        except ProcessLostError as error:
            process.close()
            raise RequestError("messages", f"the chat template {error}") from error
        except ValueError as error:
            self._idle.append(process)
            raise RequestError("messages", "a number has too many digits") from error
        except BaseException:
            # An interrupt: the answer is still on its way.
            process.close()
            raise
        self._idle.append(process)
        return answer

    def _take(self) -> TemplateProcess:
        """An idle process that still lives, or a new one."""
        while (process := self._popped()) is not None:
            if process.is_alive:
                return process
            process.close()
        try:
            return self._started()
        except (BundleError, ProcessLostError) as error:
            raise BusyError(f"the chat template's process did not start again: {error}") from error

    def _popped(self) -> TemplateProcess | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _started(self) -> TemplateProcess:
        try:
            return TemplateProcess(self._setup, self._limits.start)
        except OSError as error:
            message = f"no process for the chat template: {error.strerror}"
            raise BusyError(message) from error


def _close_all(processes: list[TemplateProcess]) -> None:
    while processes:
        processes.pop().close()
