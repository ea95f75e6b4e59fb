"""A stand-in for `LLM` whose answers the test writes."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import ContextLengthError
from trtllm_lite.runtime.host_tuning import Setting, Tuning
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from trtllm_lite.runtime.sampling_params import SamplingParams

Messages = list[dict[str, str]]


class CharTokenizer:
    """One token a character; a conversation is rendered as role: content lines."""

    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: Messages) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


TUNING = Tuning(Setting(3, "off"), "remembered")


@dataclass
class ScriptedLLM:
    """Answers each prompt with the pieces that `script` gives for it, a token a character.

    Every call must fit the signature of the real `LLM`. An exception among the pieces is raised
    there; one in place of all pieces ends the answer with that error.
    """

    script: Callable[[str], Sequence[str | BaseException]]
    opened: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    aborted: int = 0
    closed: int = 0
    step_error: str | None = None
    max_model_len: int = 1000
    defaults: SamplingParams = field(default_factory=SamplingParams)
    tuning: Tuning = TUNING
    tokenizer: CharTokenizer = field(default_factory=CharTokenizer)

    def __call__(self, *args: Any, **kwargs: Any) -> "ScriptedLLM":
        bound = inspect.signature(LLM).bind(*args, **kwargs)
        self.opened.append(bound.arguments)
        return self

    def __enter__(self) -> "ScriptedLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(4, self.max_model_len, 64, self.max_model_len * 4)

    def default_params(self) -> SamplingParams:
        return self.defaults

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        given = inspect.signature(LLM.generate).bind(self, *args, **kwargs).arguments
        return [list(self._grow(text, given["params"]))[-1] for text in given["prompts"]]

    def chat(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        given = inspect.signature(LLM.chat).bind(self, *args, **kwargs).arguments
        texts = [self.tokenizer.apply_chat_template(m) for m in given["messages"]]
        return [list(self._grow(text, given["params"]))[-1] for text in texts]

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[RequestOutput]:
        given = inspect.signature(LLM.stream).bind(self, *args, **kwargs).arguments
        text = given.get("prompt")
        if text is None:
            text = self.tokenizer.apply_chat_template(given["messages"])
        return self._grow(text, given["params"])

    def _grow(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.params.append(params)
        if len(prompt) >= self.max_model_len:
            text = f"{len(prompt)} tokens; maximum context length is {self.max_model_len}"
            raise ContextLengthError("prompt", text)
        said, finished = "", False
        pieces = self.script(prompt)
        try:
            for i, piece in enumerate(pieces):
                if isinstance(piece, BaseException):
                    raise piece
                said += piece
                finished = i == len(pieces) - 1
                yield self._result(prompt, said, piece, finished, params)
        finally:
            self.aborted += not finished

    def _result(
        self, prompt: str, said: str, delta: str, finished: bool, params: SamplingParams
    ) -> RequestOutput:
        full = len(prompt) + len(said) >= self.max_model_len
        end = ("error" if self.step_error else "length" if full else "stop") if finished else None
        metrics = RequestMetrics(1.0, 1.0, 1.5, 2.5 if finished else None, len(said))
        choices = [
            CompletionOutput(
                index=index,
                text=said,
                token_ids=tuple(map(ord, said)),
                finish_reason=end,  # type: ignore[arg-type]
                delta=delta,
                error=self.step_error if finished else None,
            )
            for index in range(params.n)
        ]
        return RequestOutput("0", prompt, tuple(map(ord, prompt)), choices, finished, metrics, 3)


@pytest.fixture
def scripted_llm(monkeypatch: pytest.MonkeyPatch) -> ScriptedLLM:
    """What the commands open; it answers "<", the prompt's last word and ">" until told else."""
    llm = ScriptedLLM(lambda prompt: ["<", prompt.split()[-1], ">"])
    module = ModuleType("trtllm_lite.runtime.llm")
    vars(module)["LLM"] = llm
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return llm
