"""The state of one server: what it serves, whether it is ready, and who is inside."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.engine import EngineStats
from trtllm_lite.runtime.errors import EngineDeadError, UsageError
from trtllm_lite.runtime.server.admission import Admission
from trtllm_lite.runtime.server.errors import ApiError, unavailable
from trtllm_lite.runtime.server.metrics import Metrics
from trtllm_lite.runtime.server.parsers.formats import ToolFormat
from trtllm_lite.runtime.server.settings import ServerConfig
from trtllm_lite.runtime.server.tracing import NoTracer, Tracer

Phase = Literal["loading", "ready", "draining", "dead"]

STATS_SECONDS = 0.25
"""How long a look at the engine may take: it answers between two steps."""
_NAME = re.compile(r"[\w.:/+@-]{1,200}", re.ASCII)


@dataclass(frozen=True)
class ModelCard:
    """What clients are told about a served model. Raises UsageError for a name that is none.

    names: the first is the usual one, the others are aliases. created: Unix seconds. facts: JSON
    data about the bundle. tool_format: how the model writes tool calls, if it does. reasoning:
    whether it thinks between `<think>` tags first.
    """

    names: tuple[str, ...]
    created: int
    fingerprint: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tool_format: ToolFormat | None = None
    reasoning: bool = False

    def __post_init__(self) -> None:
        for name in self.names:
            check_model_name(name)


def check_model_name(name: str) -> None:
    """Raises UsageError for what cannot be the name of a served model."""
    if not _NAME.fullmatch(name):
        allowed = "letters, digits and ._:/+@-, at most 200"
        raise UsageError(f"served model name {name[:60]!r}; allowed: {allowed}")


@dataclass(frozen=True)
class Served:
    """A model under one of its names."""

    name: str
    llm: AsyncLLM
    card: ModelCard


@dataclass
class Loading:
    """How far loading is: written by the thread that loads, read by the routes. The percentage is
    of all models: each counts alike, and of the present one its present step."""

    step: str = "open the bundle"
    percent: int = 0


class Service:
    """Owns the phase: loading -> ready -> draining, and dead from anywhere. For one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics or Metrics(config.metrics_alias, config.max_queue)
        self.tracer = tracer or NoTracer()
        self.loading = Loading()
        self.phase: Phase = "loading"
        self.died = asyncio.Event()
        self.reason = ""
        """Why it died."""
        self.admission = Admission(None, self.metrics)
        """Of everybody, whatever the model."""
        self._models: dict[str, Served] = {}
        self._engines: list[Served] = []
        self._queues: dict[str, Admission] = {}

    @property
    def models(self) -> list[Served]:
        """Every name that is served, in order; the first is the default."""
        return list(self._models.values())

    @property
    def engines(self) -> list[Served]:
        """Every model once, under its usual name."""
        return list(self._engines)

    def ready(self, llm: AsyncLLM, card: ModelCard) -> None:
        """Serve a model, or one more, from now on. Raises UsageError for a name that is taken."""
        taken = next((name for name in card.names if name in self._models), None)
        if taken is not None:
            raise UsageError(f"served model name {taken!r}: another model has it")
        limit = llm.config.max_num_seqs + self.config.max_queue
        queue = Admission(limit, self.metrics, within=self.admission)
        for name in card.names:
            self._models[name] = Served(name, llm, card)
            self._queues[name] = queue
        self._engines.append(self._models[card.names[0]])
        self.metrics.watch(card.names[0], card.fingerprint, card.facts, llm)
        if self.phase == "loading":
            self.phase = "ready"

    def queue_of(self, served: Served) -> Admission:
        """Of all names of that model."""
        return self._queues[served.name]

    def drain(self) -> None:
        """Let nobody in any more."""
        if self.phase != "dead":
            self.phase = "draining"

    def die(self, reason: str) -> None:
        """The engine is gone, and the server with it. The first reason counts."""
        if not self.died.is_set():
            self.reason = reason
        self.phase = "dead"
        self.died.set()

    def check_open(self) -> None:
        """Raises ApiError 503 while no request is taken."""
        if self.phase != "ready":
            self.metrics.rejected(self.phase)
            raise self.refusal()

    def refusal(self) -> ApiError:
        """Why nobody is let in."""
        if self.phase == "loading":
            done = f"{self.loading.step}, {self.loading.percent}%"
            return unavailable(f"the model is loading: {done}", "loading", 2)
        if self.phase == "draining":
            return unavailable("the server is shutting down", "draining", 5)
        return unavailable("the engine has stopped", "engine_dead", 5)

    def resolve(self, name: str | None) -> Served:
        """The model of that name; None is the first. Raises ApiError 404."""
        if name is None:
            return self.models[0]
        served = self._models.get(name)
        if served is None:
            message = f"The model `{name[:200]}` does not exist."
            raise ApiError(404, message, param="model", code="model_not_found")
        return served

    async def stats(self) -> EngineStats | None:
        """The default model's numbers; None when it has none or is busy. Notices when the engine
        of any model is dead."""
        found = await asyncio.gather(*(self._look(each.llm) for each in self._engines))
        return found[0] if found else None

    async def _look(self, llm: AsyncLLM) -> EngineStats | None:
        try:
            async with asyncio.timeout(STATS_SECONDS):
                return await llm.stats()
        except TimeoutError:
            return None
        except EngineDeadError as error:
            if self.phase != "draining":
                self.die(str(error))
            return None
