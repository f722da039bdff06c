"""Which paths there are: inference on pairs, an explicit list passed to one endpoint, the proxy's own, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.client import header_map
from proxy.errors import NotSupportedError, ProxyError, error_body
from proxy.inference import InferenceRoute, PassedOnRoute, Route, Services
from proxy.own_routes import OwnRoutes
from proxy.request import KINDS, PASSED_ON

# Known, but not served here.
NOT_SERVED: Mapping[str, str] = {
    "/v1/audio/transcriptions": "audio is not served by prefill and decode pools",
    "/v1/audio/translations": "audio is not served by prefill and decode pools",
    "/v1/audio/speech": "audio is not served by prefill and decode pools",
    "/v1/images/generations": "images are not served by prefill and decode pools",
    "/v1/realtime": "WebSocket sessions are not relayed",
    "/v1/files": "there is no file store behind this endpoint",
    "/v1/batches": "there is no batch queue behind this endpoint",
    "/v1/responses/{response_id}": "responses are not stored: engines keep no shared state",
    "/v1/responses/{response_id}/cancel": "responses are not stored: engines keep no shared state",
    "/inference/v1/generate": "the token-in token-out API is not relayed",
    "/v1/chat/completions/batch": "several conversations in one call cannot be split over prefill and decode",
    "/cohere/v2/chat": "Cohere's chat API is not relayed",
    "/v1/images/edits": "images are not served by prefill and decode pools",
    "/v1/moderations": "there is no moderation model behind this endpoint",
}
_ANY_METHOD = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_ANY_OBJECT = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
_CLIENT_ERROR, _UNAVAILABLE = 400, 503


def hot_routes(services: Services) -> Mapping[str, Route]:
    """Return the routes that engines serve, by path; the application calls them without FastAPI's own layers."""
    routes: dict[str, Route] = {kind.route: InferenceRoute(services, kind) for kind in KINDS.values()}
    return routes | {path: PassedOnRoute(services, path) for path in PASSED_ON}


def make_router(services: Services, hot: Mapping[str, Route]) -> APIRouter:
    """Return all routes."""
    router = APIRouter()
    for path, route in hot.items():
        methods = list(PASSED_ON.get(path, ("POST",)))
        body = {"requestBody": _ANY_OBJECT} if "POST" in methods else None
        router.add_api_route(
            path, _as_endpoint(route), methods=methods, response_model=None, openapi_extra=body, name=path
        )
    for path, reason in NOT_SERVED.items():
        router.add_api_route(path, _refusing_route(path, reason), methods=_ANY_METHOD, include_in_schema=False)
    own = OwnRoutes(services)
    router.add_api_route("/health", own.health, methods=["GET"])
    router.add_api_route("/ready", own.ready, methods=["GET"], response_model=None)
    for path, endpoint in (("/v1/models", own.models), ("/metrics", own.metrics)):
        with_key = [Depends(_needs_key(services))]
        router.add_api_route(path, endpoint, methods=["GET"], response_model=None, dependencies=with_key)
    return router


def error_response(error: ProxyError, *, anthropic: bool = False) -> Response:
    """Return an error as JSON in the API's own shape."""
    body = orjson.dumps(error_body(error, anthropic=anthropic))
    return Response(body, error.status, error.headers, "application/json")


class _Delegated(Response):
    """A response that an ASGI application sends."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _as_endpoint(app: ASGIApp) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:  # noqa: ARG001 - FastAPI documents it by its signature
        return _Delegated(app)

    return endpoint


def _needs_key(services: Services) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        services.gate.check(header_map(request.scope))

    return check


def _refusing_route(path: str, reason: str) -> Any:
    async def handle() -> Response:
        raise NotSupportedError(f"{path}: {reason}", code="not_supported")

    return handle
