"""The ASGI application: which route is where, and what lies in front of the routes."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.server.auth import HEALTH_PATHS, KeyGuard
from trtllm_lite.runtime.server.capabilities import CapabilityRoute
from trtllm_lite.runtime.server.chat import ChatRoute
from trtllm_lite.runtime.server.completion import CompletionRoute
from trtllm_lite.runtime.server.errors import ApiError, from_exception
from trtllm_lite.runtime.server.gate import LoadingGate
from trtllm_lite.runtime.server.health import HealthRoutes
from trtllm_lite.runtime.server.models import ModelRoutes
from trtllm_lite.runtime.server.pages import Pages
from trtllm_lite.runtime.server.request_log import RequestLog
from trtllm_lite.runtime.server.responses import error_response
from trtllm_lite.runtime.server.service import Service
from trtllm_lite.runtime.server.tokens import TokenRoutes

_Handler = Callable[[Request, Exception], Awaitable[Response]]


def create_app(service: Service, version: str) -> Starlette:
    """Routes over a service, which may still be loading. `version` is this package's."""
    pages = Pages()
    app = Starlette(
        routes=[*_api_routes(service), *_health_routes(service, version), *pages.routes()],
        middleware=_layers(service, pages.paths),
        exception_handlers=_handlers(),
    )
    # A path with one slash too many is not found: a redirect would be a second way to a route.
    app.router.redirect_slashes = False
    return app


def _api_routes(service: Service) -> list[BaseRoute]:
    models, tokens = ModelRoutes(service), TokenRoutes(service)
    return [
        Route("/v1/chat/completions", ChatRoute(service), methods=["POST"], name="chat"),
        Route("/v1/completions", CompletionRoute(service), methods=["POST"], name="completions"),
        Route("/v1/models", models.index, methods=["GET"]),
        Route("/v1/models/{id:path}", models.one, methods=["GET"]),
        Route("/v1/capabilities", CapabilityRoute(service).show, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
    ]


def _health_routes(service: Service, version: str) -> list[BaseRoute]:
    health = HealthRoutes(service, version)
    return [
        Route("/live", health.live, methods=["GET"]),
        Route("/health", health.health, methods=["GET"]),
        Route("/v1/health", health.health, methods=["GET"]),
        Route("/ready", health.health, methods=["GET"]),
        Route("/version", health.version, methods=["GET"]),
        Route("/metrics", health.metrics, methods=["GET"]),
    ]


def _layers(service: Service, pages: frozenset[str]) -> list[Middleware]:
    """Outermost first."""
    config = service.config
    layers = [Middleware(RequestLog, config.limits.headers)]
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("authorization", "content-type", "x-api-key", "x-request-id"),
                expose_headers=("x-request-id", "retry-after"),
            )
        )
    layers.append(Middleware(KeyGuard, config.key_digests, HEALTH_PATHS | pages))
    layers.append(Middleware(LoadingGate, service))
    return layers


def _handlers() -> dict[type[Exception], _Handler]:
    async def known(request: Request, error: Exception) -> Response:
        return error_response(from_exception(error))

    async def http(request: Request, error: Exception) -> Response:
        told = _http_error(error) if isinstance(error, HTTPException) else from_exception(error)
        return error_response(told)

    return {ApiError: known, TrtllmLiteError: known, HTTPException: http}


def _http_error(error: HTTPException) -> ApiError:
    """The router's own errors: 404 and 405."""
    headers = tuple((error.headers or {}).items())
    messages = {
        404: ("there is no such route; see /v1/capabilities", "not_found"),
        405: ("this route does not have that method", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (error.detail, "http_error"))
    return ApiError(error.status_code, message, code=code, headers=headers)
