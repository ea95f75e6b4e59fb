"""GET /v1/models and GET /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trtllm_lite.runtime.server.responses import json_response
from trtllm_lite.runtime.server.service import Served, Service


class ModelRoutes:
    """What is served, and what is known about it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def index(self, request: Request) -> Response:
        """All names, aliases included."""
        models = [model_object(served) for served in self._service.models]
        return json_response({"object": "list", "data": models})

    async def one(self, request: Request) -> Response:
        """One name. Raises ApiError 404."""
        return json_response(model_object(self._service.resolve(request.path_params["id"])))


def model_object(served: Served) -> dict[str, Any]:
    """OpenAI's model object; `trtllm_lite` holds the bundle's facts."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.card.created,
        "owned_by": "trtllm-lite",
        "root": served.card.names[0],
        "parent": None,
        "max_model_len": served.llm.config.max_sequence_tokens,
        "trtllm_lite": dict(served.card.facts),
    }
