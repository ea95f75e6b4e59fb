"""The run behind `trtllm-lite serve --replicas`: one front, several processes with the models."""

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_lite import __version__
from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.host import available_memory, physical_cores
from trtllm_lite.runtime.loading import LoadOptions, engine_config, load
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.logs import LogFormat, configure_logging
from trtllm_lite.runtime.server.replicas.life import FrontServer
from trtllm_lite.runtime.server.replicas.plan import FleetPlan
from trtllm_lite.runtime.server.replicas.ray_environment import prepare
from trtllm_lite.runtime.server.replicas.replica import ReplicaPlan
from trtllm_lite.runtime.server.replicas.scale import Scale, parse_scale
from trtllm_lite.runtime.server.request_log import ACCESS
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import ServerConfig
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.failures import needs_extra
from trtllm_lite.tools.options import load_arguments
from trtllm_lite.tools.serve_models import Wanted, shared_options, wanted_models
from trtllm_lite.tools.serve_run import (
    Reads,
    model_card,
    server_config,
    until_told,
    within_open_files,
)
from trtllm_lite.tools.serve_says import reader_may_leave, ready_line_of, warn_of_settings

if TYPE_CHECKING:
    from trtllm_lite.runtime.server.replicas.ray_fleet import RayFleet


@dataclass(frozen=True)
class Opening:
    """Opens the models of a replica, in its process: it goes there by pickle."""

    models: tuple[Wanted, ...]
    options: LoadOptions
    reads: Reads
    log_format: LogFormat

    @property
    def names(self) -> list[str]:
        """Of all models for clients."""
        return [name for model in self.models for name in model.names]

    def __call__(self) -> list[tuple[AsyncLLM, ModelCard]]:
        """Raises what `load` raises. The access log is the front's."""
        configure_logging(self.log_format)
        logging.getLogger(ACCESS).setLevel(logging.WARNING)
        return [self._opened(model) for model in self.models]

    def _opened(self, model: Wanted) -> tuple[AsyncLLM, ModelCard]:
        parts = load(model.bundle, self.options)
        card = model_card(model.bundle, model.names, parts.config, self.reads)
        return AsyncLLM.from_parts(parts), card


def run_replicas(console: Console, bundles: Sequence[str], values: dict[str, Any]) -> int:
    """Serve until told to stop; returns the exit code. Raises TrtllmLiteError: the port, a bundle,
    replicas that do not start, or a Ray that has stopped."""
    started = time.monotonic()
    config = within_open_files(server_config(values))
    configure_logging(values["log_format"])
    plan, opening = planned(bundles, config, values)
    with closing(bind(config.host, config.port)) as sock:
        url, fleet = url_of(sock), ray_fleet(plan)
        with reader_may_leave(sys.stderr):
            warn_of_settings(console, config)
            console.info(f"listening on {url}; starting {plan.scale.fewest} replicas", dim=True)
            console.info(f"logs of Ray and the replicas: {fleet.folder}", dim=True)

        def announce() -> None:
            with reader_may_leave(sys.stderr):
                for line in banner(plan, opening, config, url):
                    console.info(line, dim=True)
                seconds = time.monotonic() - started
                console.info(f"ready after {seconds:.1f} s; Ctrl-C stops it", dim=True)
            with reader_may_leave(sys.stdout):
                console.stream(ready_line_of(opening.names, url, values["log_format"]) + "\n")

        return until_told(console, FrontServer(config, fleet, announce, __version__), sock)


def ray_fleet(plan: FleetPlan) -> "RayFleet":
    """Raises MissingExtraError."""
    prepare()
    with needs_extra("ray"):
        from trtllm_lite.runtime.server.replicas.ray_fleet import RayFleet
    return RayFleet(plan)


def planned(
    bundles: Sequence[str], config: ServerConfig, values: dict[str, Any]
) -> tuple[FleetPlan, Opening]:
    """What the options ask for. Raises UsageError, and BundleError for a bundle that is none."""
    if values["otlp_endpoint"] is not None:
        action = "trace in front of the server, or run servers without --replicas"
        raise UsageError(f"--otlp-endpoint is not for --replicas; {action}")
    scale = parse_scale(values["replicas"])
    models = wanted_models(bundles, values["served_model_name"], values["alias"])
    given = LoadOptions(**load_arguments(values), isolate_templates=True)
    for model in models:
        _check_target(model.bundle, given)
    options = replica_options(given, models, scale, Machine.this())
    reads = Reads(values["tool_call_parser"], values["reasoning"])
    # A replica need not have this process's working folder.
    placed = tuple(replace(model, bundle=model.bundle.resolve()) for model in models)
    opening = Opening(placed, options, reads, values["log_format"])
    slots = [engine_config(read_manifest(m.bundle), options).max_num_seqs for m in models]
    inside = replace(config, key_digests=(), cors_origins=())
    replica = ReplicaPlan(opening, inside, __version__)
    by_prefix = values["replica_routing"] == "prefix"
    return FleetPlan(replica, scale, sum(slots), config.max_queue, by_prefix), opening


def _check_target(bundle: Path, options: LoadOptions) -> None:
    """Replicas get parts of the cores and of the memory. Raises UsageError for a GPU's bundle."""
    target = read_manifest(bundle).target
    on_gpu = options.backend != "onnxruntime" or options.provider != "auto"
    if target == "cuda" or (target == "tensorrt" and on_gpu):
        on_cpu = "" if target == "cuda" else ", or with --backend onnxruntime"
        raise UsageError(
            f"--replicas: {bundle} is for {target}, and replicas share cores, not a GPU; serve it "
            f"without --replicas{on_cpu}"
        )


@dataclass(frozen=True)
class Machine:
    """What all replicas share. memory: bytes that may still be taken; None: nobody says."""

    cores: int
    memory: int | None

    @classmethod
    def this(cls) -> "Machine":
        """The one that this process runs on."""
        return cls(physical_cores(), available_memory())


def replica_options(
    options: LoadOptions, models: Sequence[Wanted], scale: Scale, machine: Machine
) -> LoadOptions:
    """For one replica: its part of the cores, unless the number of threads is given, and of the
    memory. Raises UsageError where the bundles are larger than that."""
    most = scale.most
    if options.intra_op_num_threads is None:
        options = replace(options, intra_op_num_threads=max(1, machine.cores // most))
    options = replace(options, prefix_cache_bytes=options.prefix_cache_bytes // most)
    if machine.memory is None:
        return shared_options(options, models, None)
    share = machine.memory // most
    return shared_options(replace(options, kv_bytes=share // 2), models, share)


def banner(plan: FleetPlan, opening: Opening, config: ServerConfig, url: str) -> list[str]:
    """What an operator wants to see once."""
    scale, threads = plan.scale, opening.options.intra_op_num_threads
    count = f"{scale.fewest}" if scale.fixed else f"{scale.fewest} to {scale.most}"
    return [
        f"model {', '.join(opening.names)}",
        f"  {count} replicas, {plan.slots} slots and {threads} threads each; "
        f"{plan.max_queue} requests may wait",
        f"API keys: {len(config.key_digests) or 'none, everybody is let in'}",
        f"page {url}/   API {url}/v1   metrics {url}/metrics",
    ]
