"""The routes: inference on pairs, an explicit list passed to one endpoint, and the proxy's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.client import header_map
from proxy.engine_client import EngineReply
from proxy.errors import EngineFailedError, NoEndpointError, NotSupportedError, ProxyError, error_body
from proxy.firewall import headers_for_client, headers_for_engine, new_request_id
from proxy.inference import CALL_LIMIT_S, InferenceRoute, PassedOnRoute, Services
from proxy.request import KINDS

# Served whole by one decode endpoint.
PASSED_ON: Mapping[str, tuple[str, ...]] = {
    "/tokenize": ("POST",),
    "/detokenize": ("POST",),
    "/v1/embeddings": ("POST",),
    "/v1/messages/count_tokens": ("POST",),
    "/v1/score": ("POST",),
    "/score": ("POST",),
    "/v1/rerank": ("POST",),
    "/rerank": ("POST",),
    "/v2/rerank": ("POST",),
    "/v2/embed": ("POST",),
    "/classify": ("POST",),
    "/pooling": ("POST",),
    "/version": ("GET",),
}

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


def hot_routes(services: Services) -> Mapping[str, ASGIApp]:
    """Return the routes that engines serve, by path; the application calls them without FastAPI's own layers."""
    routes: dict[str, ASGIApp] = {kind.route: InferenceRoute(services, kind) for kind in KINDS.values()}
    return routes | {path: PassedOnRoute(services, path) for path in PASSED_ON}


def make_router(services: Services, hot: Mapping[str, ASGIApp]) -> APIRouter:
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
    own = _OwnRoutes(services)
    router.add_api_route("/v1/models", own.models, methods=["GET"], response_model=None)
    router.add_api_route("/health", own.health, methods=["GET"])
    router.add_api_route("/ready", own.ready, methods=["GET"], response_model=None)
    router.add_api_route("/metrics", own.metrics, methods=["GET"], response_model=None)
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


def _refusing_route(path: str, reason: str) -> Any:
    async def handle() -> Response:
        raise NotSupportedError(f"{path}: {reason}", code="not_supported")

    return handle


class _OwnRoutes:
    """What the proxy answers itself."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def health(self) -> dict[str, str]:
        """Say that the proxy runs; engines are /ready's business."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """Answer 200 with at least one usable pair, 503 and what is missing without."""
        pools = self._services.handoffs.pools
        ready = pools.has_pair()
        body = {"ready": ready, "missing": list(pools.missing())}
        return Response(orjson.dumps(body), 200 if ready else _UNAVAILABLE, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """Answer with the proxy's metrics and fresh KV transfer figures of the decode engines."""
        self._services.gate.check(header_map(request.scope))
        await self._services.watcher.scrape(self._services.metrics.kv_transfer)
        return Response(self._services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """Answer with the models of all ready decode endpoints, each once."""
        self._services.gate.check(header_map(request.scope))
        pools, client = self._services.handoffs.pools, self._services.client
        ready = [endpoint for endpoint in pools.of_role("decode") if endpoint.ready]
        if not ready:
            raise NoEndpointError("no decode endpoint is ready; /ready says what is missing")
        headers = headers_for_engine(header_map(request.scope), new_request_id(), self._services.authorization)
        replies = await asyncio.gather(
            *(client.get(endpoint, "/v1/models", CALL_LIMIT_S, headers) for endpoint in ready), return_exceptions=True
        )
        models: dict[str, Any] = {}
        for reply in replies:
            if isinstance(reply, EngineReply) and reply.status < _CLIENT_ERROR:
                models |= {
                    model["id"]: model for model in orjson.loads(reply.body)["data"] if model["id"] not in models
                }
        if not models:
            first = next((reply for reply in replies if isinstance(reply, EngineReply)), None)
            if first is None:
                raise EngineFailedError("models: no decode endpoint answered")
            return Response(first.body, first.status, headers_for_client(first.headers))
        return Response(orjson.dumps({"object": "list", "data": list(models.values())}), media_type="application/json")
