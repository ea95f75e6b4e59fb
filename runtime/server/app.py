"""The ASGI application: which route is where, and what lies in front of the routes."""

from collections.abc import Awaitable, Callable, Iterable

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
from trtllm_lite.runtime.server.messages_api.route import CountTokensRoute, MessagesRoute
from trtllm_lite.runtime.server.models import ModelRoutes
from trtllm_lite.runtime.server.openapi import OpenApiRoute
from trtllm_lite.runtime.server.pages import Pages, all_pages
from trtllm_lite.runtime.server.request_log import RequestLog
from trtllm_lite.runtime.server.responses import error_response
from trtllm_lite.runtime.server.responses_api.route import ResponsesRoute, not_stored
from trtllm_lite.runtime.server.service import Service
from trtllm_lite.runtime.server.settings import ServerConfig
from trtllm_lite.runtime.server.tokens import TokenRoutes

_CALLER_HEADERS = (
    *("authorization", "content-type", "x-api-key", "x-request-id"),
    *("openai-organization", "openai-project", "openai-beta"),
    *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
    *(
        f"x-stainless-{name}"
        for name in (
            *("arch", "lang", "os", "package-version", "runtime", "runtime-version"),
            *("helper", "helper-method", "retry-count", "timeout"),
        )
    ),
)
"""What clients of both APIs send, in browsers too."""
_Handler = Callable[[Request, Exception], Awaitable[Response]]


def create_app(service: Service, version: str) -> Starlette:
    """Routes over a service, which may still be loading. `version` is this package's."""
    pages = all_pages()
    app = Starlette(
        routes=[
            *_api_routes(service),
            *_health_routes(service, version),
            *(route for each in pages for route in each.routes()),
        ],
        middleware=[
            *outer_layers(service.config, public_paths(pages)),
            Middleware(LoadingGate, service, page_paths(pages)),
        ],
        exception_handlers=error_handlers(),
    )
    # A path with one slash too many is not found: a redirect would be a second way to a route.
    app.router.redirect_slashes = False
    return app


def _api_routes(service: Service) -> list[BaseRoute]:
    models, tokens = ModelRoutes(service), TokenRoutes(service)
    return [
        Route("/v1/chat/completions", ChatRoute(service), methods=["POST"], name="chat"),
        Route("/v1/completions", CompletionRoute(service), methods=["POST"], name="completions"),
        Route("/v1/responses", ResponsesRoute(service), methods=["POST"], name="responses"),
        Route("/v1/responses/{id:path}", not_stored, methods=["GET", "POST", "DELETE"]),
        Route("/v1/messages", MessagesRoute(service), methods=["POST"], name="messages"),
        Route("/v1/messages/count_tokens", CountTokensRoute(service).count, methods=["POST"]),
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
        Route("/openapi.json", OpenApiRoute(service.config, version).show, methods=["GET"]),
    ]


def public_paths(pages: Iterable[Pages]) -> frozenset[str]:
    """What needs no key: the probes and the files of pages."""
    return HEALTH_PATHS | page_paths(pages)


def page_paths(pages: Iterable[Pages]) -> frozenset[str]:
    """The files of all pages."""
    return frozenset(path for each in pages for path in each.paths)


def outer_layers(config: ServerConfig, public: frozenset[str]) -> list[Middleware]:
    """What lies in front of everything, outermost first. `public`: paths that need no key."""
    layers = [Middleware(RequestLog, config.limits.headers)]
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=_CALLER_HEADERS,
                expose_headers=("x-request-id", "retry-after"),
            )
        )
    layers.append(Middleware(KeyGuard, config.key_digests, public))
    return layers


def error_handlers() -> dict[type[Exception], _Handler]:
    """From what routes raise to answers."""

    async def known(request: Request, error: Exception) -> Response:
        return error_response(from_exception(error), request.scope)

    async def http(request: Request, error: Exception) -> Response:
        told = _http_error(error) if isinstance(error, HTTPException) else from_exception(error)
        return error_response(told, request.scope)

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
