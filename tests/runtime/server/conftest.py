"""The server in process, over a fake model: a client that is its own HTTP server."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest
import tokenizers
from starlette.applications import Starlette
from starlette.types import Message, Scope
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import F32, FakeSession
from trtllm_lite.runtime.chat_template import ChatTemplate
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.grammar_compiler import CachedCompiler, open_llguidance
from trtllm_lite.runtime.loading import Parts
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.app import create_app
from trtllm_lite.runtime.server.errors import MAX_BODY
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import ServerConfig
from trtllm_lite.runtime.tokenizer import Renderer, Tokenizer

VOCAB = 84
PATIENCE = 60
"""Seconds that a test may take where the machine is busy."""
ENGINE = EngineConfig(
    max_num_seqs=3,
    max_model_len=64,
    max_num_batched_tokens=16,
    max_kv_tokens=192,
    block_size=4,
    check_invariants=True,
)
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if mood %}{{ mood }}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)
CARD = ModelCard(("fake", "alias/two"), 1_700_000_000, "fp-1", {"parity": {"passed": True}})


def byte_tokenizer(template: str = TEMPLATE, renderer: Renderer = ChatTemplate) -> Tokenizer:
    """One token a byte; there are those of letters, digits and JSON, and of two that take more."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = (
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,é😀" + '{}[]":0123456789_-<>/\n'
    )
    pieces = level.pre_tokenize_str(letters)
    alphabet = sorted({c for piece, _ in pieces for c in piece})
    assert len(alphabet) == VOCAB - 1
    vocab = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = level, decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return Tokenizer(raw, chat_template=template, renderer=renderer)


class GatedSession(FakeSession):
    """A session whose runs wait for a permit each, unless it is open."""

    def __init__(self, config: EngineConfig = ENGINE, *, is_open: bool = True) -> None:
        super().__init__(SessionOptions(config.max_num_seqs, config.capacity), vocab_size=VOCAB)
        self.permits = threading.Semaphore(0)
        self.is_open = is_open
        self.entered = threading.Event()
        self.fatal = False

    def run(self, batch: Batch) -> F32:
        self.entered.set()
        if not self.is_open:
            self.permits.acquire()
        if self.fatal:
            raise SystemExit("out of order")  # nothing that a step isolates
        return super().run(batch)


def make_llm(
    session: FakeSession, config: EngineConfig = ENGINE, tokenizer: Tokenizer | None = None
) -> AsyncLLM:
    engine = Engine(session, config, vocab_size=VOCAB, eos_token_ids=(0,))
    tokenizer, defaults = tokenizer or byte_tokenizer(), SamplingParams(temperature=0.0)
    grammars = CachedCompiler(lambda: open_llguidance(tokenizer.to_json(), VOCAB, (0,)))
    return AsyncLLM.from_parts(Parts(engine, config, tokenizer, defaults, grammars=grammars))


@dataclass
class Answer:
    """One response, whole."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json()["error"]
        return found

    def check_refused(self, status: int = 400) -> None:
        """An error of OpenAI's shape that tells nothing of the server's inside."""
        assert self.status == status, self.body
        assert len(self.body) <= MAX_BODY
        assert self.error.keys() == {"message", "type", "param", "code"}
        for secret in (b"Traceback", b"0x7f", b"/tmp/", b"/usr/", b"site-packages"):
            assert secret not in self.body

    def events(self) -> list[Any]:
        """The JSON of every event, checked to be framed; [DONE] as text. Comments are skipped."""
        assert self.body.endswith(b"\n\n")
        made: list[Any] = []
        for part in self.body.split(b"\n\n")[:-1]:
            if part.startswith(b":"):
                continue
            assert part.startswith(b"data: ")
            data = part.removeprefix(b"data: ")
            made.append("[DONE]" if data == b"[DONE]" else orjson.loads(data))
        return made

    def named_events(self) -> list[Any]:
        """The JSON of every event of a stream, checked to bear its type as its name."""
        assert self.body.endswith(b"\n\n")
        made: list[Any] = []
        for part in self.body.split(b"\n\n")[:-1]:
            if part.startswith(b":"):
                continue
            name, data = part.split(b"\n")
            made.append(orjson.loads(data.removeprefix(b"data: ")))
            assert name == b"event: " + made[-1]["type"].encode()
        return made


class Live:
    """One exchange while it goes on: may stop reading, and may leave."""

    def __init__(self, app: Starlette, scope: Scope, chunks: list[bytes]) -> None:
        self.answer = Answer()
        self.reading = asyncio.Event()
        self.reading.set()
        self._chunks = chunks
        self._left = asyncio.Event()
        self._grown = asyncio.Event()
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def until(self, condition: Callable[[Answer], bool]) -> None:
        while not condition(self.answer):
            self._grown.clear()
            await self._grown.wait()

    async def whole(self) -> Answer:
        await self.task
        return self.answer

    async def _receive(self) -> Message:
        if self._chunks:
            body = self._chunks.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._chunks)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            pairs = message["headers"]
            self.answer.headers = {k.decode().lower(): v.decode() for k, v in pairs}
        else:
            self.answer.body += message["body"]
            if not message.get("more_body", False):
                self._left.set()
        self._grown.set()


@dataclass
class Lab:
    """A server, its parts, and a client."""

    app: Starlette
    service: Service
    llm: AsyncLLM
    session: GatedSession

    def start(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        chunks: list[bytes] | None = None,
    ) -> Live:
        """Begin a request; `chunks` are a raw body."""
        given = {"host": "test", **(headers or {})}
        if body is not None or chunks is not None:
            given.setdefault("content-type", "application/json")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 8000),
            "headers": [(k.lower().encode(), v.encode()) for k, v in given.items() if v],
        }
        sent = chunks if chunks is not None else [b"" if body is None else orjson.dumps(body)]
        return Live(self.app, scope, list(sent))

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.start("GET", path, headers=headers).whole()

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.start("POST", path, body, headers).whole()

    async def chat(self, content: str = "hello", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = (await self.get("/metrics")).body.decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        found = [ln for ln in lines if ln.split("{")[0].split(" ")[0] == f"trtllm_lite_{name}"]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    async def idle(self) -> None:
        """Nothing runs, waits or holds a slot any more."""
        while True:
            stats = await self.llm.stats()
            busy = stats.running or stats.waiting or stats.slots_used
            if not busy and not self.service.admission.requests:
                return
            await asyncio.sleep(0.001)


RunLab = Callable[..., None]


@pytest.fixture
def run_lab() -> RunLab:
    """Runs a test, an async function of a `Lab`, with a server of this configuration."""

    def run(
        test: Callable[[Lab], Coroutine[Any, Any, None]],
        config: ServerConfig | None = None,
        *,
        is_open: bool = True,
        loaded: bool = True,
        room: int = 64,
        card: ModelCard = CARD,
        template: str = TEMPLATE,
        renderer: Renderer = ChatTemplate,
    ) -> None:
        async def main() -> None:
            service = Service(config or ServerConfig())
            limits = replace(ENGINE, max_model_len=room, max_kv_tokens=3 * room)
            session = GatedSession(limits, is_open=is_open)
            async with make_llm(session, limits, byte_tokenizer(template, renderer)) as llm:
                if loaded:
                    service.ready(llm, card)
                app = create_app(service, "9.9")
                try:
                    await asyncio.wait_for(test(Lab(app, service, llm, session)), PATIENCE)
                finally:
                    session.is_open = True
                    session.permits.release()

        asyncio.run(main())

    return run


@pytest.fixture
def run_lively(run_lab: RunLab) -> RunLab:
    """As `run_lab`, with a greedy request before and after that must get one answer."""

    def run(test: Callable[[Lab], Coroutine[Any, Any, None]], *args: Any, **options: Any) -> None:
        async def checked(lab: Lab) -> None:
            before = await lab.chat("golden", max_tokens=6, temperature=0)
            assert before.status == 200, before.body
            await test(lab)
            assert (await lab.get("/health")).status == 200
            after = await lab.chat("golden", max_tokens=6, temperature=0)
            assert after.json()["choices"] == before.json()["choices"]
            await lab.idle()

        run_lab(checked, *args, **options)

    return run


@pytest.fixture(scope="session")
def new_llm() -> Callable[..., tuple[AsyncLLM, GatedSession]]:
    """Makes an engine of its own; True: its steps wait for no permits. `room`: tokens of one."""

    def make(is_open: bool, room: int = 64) -> tuple[AsyncLLM, GatedSession]:
        limits = replace(ENGINE, max_model_len=room, max_kv_tokens=3 * room)
        session = GatedSession(limits, is_open=is_open)
        return make_llm(session, limits), session

    return make


@pytest.fixture(scope="session")
def card() -> ModelCard:
    return CARD
