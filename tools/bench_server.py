"""The run behind `bench --server`: one engine, a server in front of it, and a client beside it."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtllm_lite import __version__
from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import StepError
from trtllm_lite.runtime.loading import LoadOptions, load
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.runtime.server.lifecycle import LoadProgress, Server
from trtllm_lite.runtime.server.listening import bind
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import ServerConfig
from trtllm_lite.tools.bench_program import Idle, idle_streams, ready_seconds
from trtllm_lite.tools.bench_server_report import Measured, server_report
from trtllm_lite.tools.bench_server_run import (
    TOGETHER,
    LoadProcess,
    Round,
    ServerBenchOptions,
    SideBench,
)
from trtllm_lite.tools.options import load_arguments
from trtllm_lite.tools.serve_run import Reads, model_card

IDLE_OUTPUT = 4096
"""Tokens of the request that holds the slot while idle streams wait, where so many fit."""


def measure_server(
    bundle: str, options: ServerBenchOptions, values: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """The whole document. `values`: the engine's options. Raises TrtllmLiteError."""
    progress.step("open the bundle")
    opened = open_bundle(Path(bundle), check_hashes=values.pop("hash_check"))
    limits = opened.manifest.limits
    options.check(limits.max_model_len)
    given = {**load_arguments(values), "speculation": values.get("speculation") or "off"}
    program = program_arguments(given)
    progress.step("start the server")
    ready = ready_seconds(bundle, program, options.starts)
    idle: Idle | None = None
    if options.idle_streams:
        progress.step("open idle streams")
        length = min(IDLE_OUTPUT, limits.max_model_len - options.input_len)
        idle = idle_streams(bundle, program, options.idle_streams, length)
    progress.step("load")
    fixed = {
        "max_num_seqs": min(TOGETHER, limits.max_num_seqs),
        "enable_prefix_caching": False,
        "check_hashes": False,
    }
    parts = load(bundle, LoadOptions(**{**given, **fixed}))
    vocab_size = opened.manifest.model.vocab_size
    card = model_card(Path(bundle), ("bench",), parts.config, Reads())
    rounds = asyncio.run(compare(AsyncLLM.from_parts(parts), card, vocab_size, options, progress))
    engine = asdict(parts.config)
    if parts.tuning is not None:
        engine |= asdict(parts.tuning.setting) | {"tuning": parts.tuning.origin}
    return server_report(opened, options, engine, Measured(rounds, ready, idle))


def program_arguments(given: Mapping[str, Any]) -> list[str]:
    """The engine's options as `serve` has them."""
    flags = {
        "intra_op_num_threads": "--threads",
        "max_num_batched_tokens": "--max-num-batched-tokens",
        "kernels": "--kernels",
        "rounding": "--rounding",
        "kv_dtype": "--kv-dtype",
        "backend": "--backend",
        "speculation": "--speculation",
    }
    pairs = [(flag, given[name]) for name, flag in flags.items() if name in given]
    switches = {"spin": "spin", "huge_pages": "huge-pages", "host_cache": "host-cache"}
    made = [word for flag, value in pairs for word in (flag, str(value))]
    return made + [
        f"--{flag}" if given[name] else f"--no-{flag}"
        for name, flag in switches.items()
        if name in given
    ]


async def compare(
    llm: AsyncLLM,
    card: ModelCard,
    vocab_size: int,
    options: ServerBenchOptions,
    progress: Progress,
) -> list[Round]:
    """All rounds, on an engine that the server owns and closes. Raises StepError."""
    ready = asyncio.Event()

    def opened(_: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        return llm, card

    def announce(_: Service) -> None:
        ready.set()

    server = Server(ServerConfig(port=0), opened, announce, __version__)
    with bind("127.0.0.1", 0) as sock, LoadProcess() as client:
        serving = asyncio.ensure_future(server.run(sock))
        measuring = asyncio.ensure_future(
            _measure(
                ready, SideBench(llm, vocab_size, client, sock.getsockname(), options), progress
            )
        )
        try:
            await asyncio.wait({serving, measuring}, return_when=asyncio.FIRST_COMPLETED)
            if not measuring.done():
                raise StepError("the server ended before the measurement")
            return measuring.result()
        finally:
            measuring.cancel()
            if server.stops is not None:
                server.stops.tell()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(serving, measuring, return_exceptions=True)


async def _measure(ready: asyncio.Event, sides: SideBench, progress: Progress) -> list[Round]:
    await ready.wait()
    progress.step("in process and over HTTP")
    return await sides.rounds(progress)
