"""What a fleet is asked for."""

from dataclasses import dataclass

from trtllm_lite.runtime.server.replicas.replica import ReplicaPlan
from trtllm_lite.runtime.server.replicas.scale import Scale


@dataclass(frozen=True)
class FleetPlan:
    """slots: requests that run in one replica at the same time. max_queue: requests that wait for
    any replica. by_prefix: a request goes to a replica that has had others which begin alike, as
    long as none has much more to do than the others."""

    replica: ReplicaPlan
    scale: Scale
    slots: int
    max_queue: int
    by_prefix: bool = False
