"""Replicas as actors of Ray Serve, on this machine: it starts them, watches them, puts new ones in
their place, changes their number with the load, and picks one for each request.

Ray's own HTTP proxy is not used: the front keeps the limits, the keys and the drain of a single
server, and calls replicas through a deployment handle (docs.ray.io, "Model composition").
"""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve._private import replica
from ray.serve.config import AutoscalingConfig, ProxyLocation, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.schema import LoggingConfig

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.server.replicas.fleet import QueueFullError, ReplicaLostError
from trtllm_lite.runtime.server.replicas.messages import Forwarded, Piece
from trtllm_lite.runtime.server.replicas.numbers import read_numbers
from trtllm_lite.runtime.server.replicas.plan import FleetPlan
from trtllm_lite.runtime.server.replicas.ray_messages import cause
from trtllm_lite.runtime.server.replicas.replica import Opener, Replica
from trtllm_lite.runtime.server.service import ModelCard

APP = "trtllm-lite"
DEPLOYMENT = "replica"
HEALTH_SECONDS = 1.0
"""Between two health checks of a replica. One that has died is noticed by the next request too."""
STORE_BYTES = 100 * 2**20
"""Of Ray's object store, which requests and responses this small do not use."""
NUMBERS_SECONDS = 5 * HEALTH_SECONDS
"""How old the numbers of a replica may be: those of one that has died go."""
BY_PREFIX = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)
PREFIX_CHARACTERS = 2_000_000
"""Of prompts that the router remembers."""
START_TRIES = 3
"""Of a replica, before the fleet counts as not to be started."""


@dataclass(frozen=True)
class SocketOfItsOwn:
    """Runs in a replica, before Ray Serve opens a port that takes pickles from anybody who reaches
    it, on all interfaces: it becomes a socket in `folder`, which is this user's alone. Our calls
    come another way. Raises AttributeError in a Ray that opens it differently."""

    open: Opener
    folder: str

    def __call__(self) -> Sequence[tuple[AsyncLLM, ModelCard]]:
        bind = replica.add_port_to_grpc_server
        place = f"unix:{self.folder}/{os.getpid()}.sock"
        replica.add_port_to_grpc_server = lambda server, address: bind(server, place)
        return self.open()


def end_process() -> None:
    """At once: Ray Serve sees that the replica is gone, and its requests run again elsewhere."""
    os._exit(1)


class RayFleet:
    """A `Fleet` in a Ray of its own, which ends with this process and listens on loopback only.

    `folder` is where Ray keeps its sockets and the logs of the replicas; it is removed at the end.
    """

    def __init__(self, plan: FleetPlan) -> None:
        self.by_prefix = plan.by_prefix
        self._plan = plan
        self._handle: Any = None
        # The kernel kills Ray when the thread ends that started it (PR_SET_PDEATHSIG), so there is
        # one that lives as long as the fleet.
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="trtllm-lite-ray")
        self._started: Future[None] | None = None
        # Ray lets everybody into the folder that it is given: it lies in one of this user's alone.
        self._root = Path(tempfile.mkdtemp(prefix="trtllm-"))
        self.folder = self._root / "ray"

    def start(self) -> None:
        """Start Ray and the replicas. Raises TrtllmLiteError with the reason of one that fails."""
        self._started = self._keeper.submit(self._start)
        self._started.result()

    def close(self) -> None:
        """End Ray and everything under it. While it is being started, that is left to the end of
        this process."""
        if self._started is None or self._started.done():
            self._keeper.submit(ray.shutdown).result()
        self._keeper.shutdown(wait=False)
        shutil.rmtree(self._root, ignore_errors=True)

    def running(self) -> int:
        """Replicas that Ray Serve counts as running."""
        try:
            application = serve.status().applications[APP]
        except (RayError, RayServeException, KeyError) as error:
            raise TrtllmLiteError(
                f"Ray Serve has stopped: {cause(str(error)) or type(error).__name__}"
            ) from None
        return int(application.deployments[DEPLOYMENT].replica_states.get("RUNNING", 0))

    async def send(self, request: Forwarded) -> AsyncGenerator[Piece, None]:
        """The answer of the replica that has least to do, as Ray's router picks it."""
        response = self._handle.remote(request)
        try:
            async for piece in response:
                yield piece
        except BackPressureError:
            raise QueueFullError from None
        except RayTaskError:
            # Raised by the replica itself, which is still there.
            raise
        except RayError:
            raise ReplicaLostError from None
        finally:
            # It raises again what the request has failed with.
            with suppress(Exception):
                response.cancel()

    async def metrics(self) -> Mapping[str, bytes]:
        """What the replicas have told at their last health checks."""
        return await asyncio.to_thread(read_numbers, self._root, NUMBERS_SECONDS)

    def _start(self) -> None:
        ray.init(
            address="local",
            namespace=APP,
            num_gpus=0,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.folder),
        )
        quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location=ProxyLocation.Disabled, logging_config=quiet)
        opening = SocketOfItsOwn(self._plan.replica.open, str(self._root))
        plan = replace(self._plan.replica, open=opening, numbers=self._root, end=end_process)
        application = self._deployment().bind(plan)
        try:
            handle = serve.run(application, name=APP, route_prefix=None)
        except RuntimeError as error:
            raise TrtllmLiteError(f"the replicas do not start: {_reason(error)}") from None
        self._handle = handle.options(method_name="serve", stream=True)

    def _deployment(self) -> Any:
        plan, config = self._plan, self._plan.replica.config
        number: dict[str, Any] = {"num_replicas": plan.scale.fewest}
        if not plan.scale.fixed:
            number = {"autoscaling_config": self._autoscaling()}
        return serve.deployment(
            name=DEPLOYMENT,
            max_ongoing_requests=plan.slots,
            max_queued_requests=plan.max_queue,
            health_check_period_s=HEALTH_SECONDS,
            health_check_timeout_s=config.step_timeout,
            graceful_shutdown_timeout_s=config.drain_timeout,
            max_constructor_retry_count=START_TRIES,
            request_router_config=self._routing(),
            ray_actor_options={"num_cpus": 0, "num_gpus": 0},
            **number,
        )(Replica)

    def _routing(self) -> Any:
        """By prefix: a router of Ray Serve LLM, under its inner name, since its public one needs
        packages that serve nothing here."""
        if not self._plan.by_prefix:
            return RequestRouterConfig()
        return RequestRouterConfig(
            request_router_class=BY_PREFIX,
            request_router_kwargs={
                "imbalanced_threshold": max(1, self._plan.slots // 2),
                "do_eviction": True,
                "eviction_threshold_chars": PREFIX_CHARACTERS,
                "eviction_target_chars": PREFIX_CHARACTERS * 9 // 10,
            },
        )

    def _autoscaling(self) -> Any:
        scale = self._plan.scale
        return AutoscalingConfig(
            min_replicas=scale.fewest,
            initial_replicas=scale.fewest,
            max_replicas=scale.most,
            target_ongoing_requests=max(1, self._plan.slots // 2),
        )


def _reason(error: RuntimeError) -> str:
    """What a replica raised when it was made; `error` itself where Ray does not know."""
    try:
        told = serve.status().applications[APP].deployments[DEPLOYMENT].message
    except (RayError, RayServeException, KeyError):
        told = ""
    return cause(told) or cause(str(error))
