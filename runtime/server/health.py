"""Probes, the version and the metrics."""

import sys

from starlette.requests import Request
from starlette.responses import Response

from trtllm_lite.runtime.server.metrics import CONTENT_TYPE
from trtllm_lite.runtime.server.responses import json_response
from trtllm_lite.runtime.server.service import Service


class HealthRoutes:
    """What supervisors and dashboards ask."""

    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version

    async def live(self, request: Request) -> Response:
        """200 as long as the process answers and its engine has not died."""
        alive = self._service.phase != "dead"
        return json_response({"status": "live" if alive else "dead"}, 200 if alive else 503)

    async def health(self, request: Request) -> Response:
        """200 when requests are taken; 503 while loading, draining, and with a dead engine."""
        service = self._service
        if service.phase == "ready":
            await service.stats()
        if service.phase == "ready":
            return json_response({"status": "ok"})
        body: dict[str, object] = {"status": service.phase}
        if service.phase == "loading":
            body |= {"step": service.loading.step, "percent": service.loading.percent}
        refusal = service.refusal()
        body["error"] = {
            "message": refusal.message,
            "type": refusal.kind,
            "param": None,
            "code": refusal.code,
        }
        response = json_response(body, 503)
        response.headers.update(dict(refusal.headers))
        return response

    async def version(self, request: Request) -> Response:
        """Of this package and the interpreter."""
        python = ".".join(map(str, sys.version_info[:3]))
        return json_response({"version": self._version, "python": python})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, also while loading. Waits for nothing."""
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})
