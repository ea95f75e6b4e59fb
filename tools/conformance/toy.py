"""A server over the toy model, in this process: everything but the arithmetic is what
`trtllm-lite serve` runs. Its tokenizer has a token for every byte, so any text can be written in
it, and its template takes messages, tools and calls."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from socket import socket

import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.grammar_compiler import CachedCompiler, open_llguidance
from trtllm_lite.runtime.loading import Parts
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.app import create_app
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import ServerConfig, key_digest
from trtllm_lite.runtime.tokenizer import Tokenizer
from trtllm_lite.tools.conformance.judge import ConformanceError

EOS = 0
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
)
START_SECONDS = 60
_ENGINE = EngineConfig(
    max_num_seqs=8,
    max_model_len=256,
    max_num_batched_tokens=256,
    max_kv_tokens=2048,
    block_size=16,
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, and an end token."""
    vocab = {"<eos>": EOS}
    vocab |= {text: i + 1 for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return raw


def toy_llm() -> AsyncLLM:
    """The toy model behind an engine of its own."""
    raw = byte_tokenizer()
    size = raw.get_vocab_size(with_added_tokens=True)
    session = FakeSession(SessionOptions(_ENGINE.max_num_seqs, _ENGINE.capacity), vocab_size=size)
    engine = Engine(session, _ENGINE, vocab_size=size, eos_token_ids=(EOS,))
    grammars = CachedCompiler(lambda: open_llguidance(raw.to_str(), size, (EOS,)))
    tokenizer = Tokenizer(raw, chat_template=TEMPLATE)
    parts = Parts(engine, _ENGINE, tokenizer, SamplingParams(temperature=0.0), grammars=grammars)
    return AsyncLLM.from_parts(parts)


@contextmanager
def toy_server(key: str | None = None) -> Iterator[str]:
    """The URL of a server, which ends with the block and asks for the `key`, if there is one.
    Raises ConformanceError when it does not start."""
    digests = () if key is None else (key_digest(key),)
    with closing(bind("127.0.0.1", 0)) as sock:
        running = _Running(sock, ServerConfig(max_queue=4096, key_digests=digests))
        running.start()
        try:
            yield url_of(sock)
        finally:
            running.stop()


class _Running:
    """The server in a thread of its own."""

    def __init__(self, sock: socket, config: ServerConfig) -> None:
        self._sock = sock
        self._config = config
        self._http: uvicorn.Server | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="toy-server", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._up.wait(START_SECONDS) or self._http is None:
            raise ConformanceError("the toy server did not start")

    def stop(self) -> None:
        if self._http is not None:
            self._http.should_exit = True
        self._thread.join(START_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._up.set()

    async def _serve(self) -> None:
        service = Service(self._config)
        async with toy_llm() as llm:
            service.ready(llm, ModelCard(("toy",), 0, "toy", tool_format=TOOL_FORMATS["hermes"]))
            config = uvicorn.Config(
                create_app(service, "toy"), http="h11", ws="none", lifespan="off", log_config=None
            )
            self._http = uvicorn.Server(config)
            self._up.set()
            await self._http.serve(sockets=[self._sock])
