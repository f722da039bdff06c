"""The routes: inference on pairs, an explicit list passed to one endpoint, and the proxy's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from proxy.config import ProxyConfig
from proxy.engine_client import EngineClient, EngineReply, Limit
from proxy.errors import (
    BodyTooLargeError,
    EngineFailedError,
    NoEndpointError,
    NotSupportedError,
    ProxyError,
    error_body,
)
from proxy.firewall import (
    clean_reply,
    has_transfer_fields,
    headers_for_client,
    headers_for_engine,
    new_request_id,
    refuse_transfer_fields,
    safe_request_id,
    without_transfer_fields,
)
from proxy.handoff import Handoffs
from proxy.load import Watcher
from proxy.metrics import Metrics
from proxy.relay import send_answer, send_whole
from proxy.request import KINDS, ApiKind, InferenceRequest, parse_object
from proxy.trace import Trace, outcome_of

_LOG = logging.getLogger("proxy.routes")

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
_CALL_LIMIT_S = 600.0
_CLIENT_ERROR, _UNAVAILABLE = 400, 503


@dataclass(frozen=True, slots=True)
class Services:
    """What the routes work with; made once by `create_app`."""

    config: ProxyConfig
    handoffs: Handoffs
    client: EngineClient
    watcher: Watcher
    metrics: Metrics


def make_router(services: Services) -> APIRouter:
    """Return all routes."""
    router = APIRouter()
    for kind in KINDS.values():
        router.add_api_route(kind.route, _inference_route(services, kind), methods=["POST"], response_model=None)
    for path, methods in PASSED_ON.items():
        router.add_api_route(path, _passing_route(services, path), methods=list(methods), response_model=None)
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


def _inference_route(services: Services, kind: ApiKind) -> Any:
    def respond(request: Request, raw: bytes, fields: Mapping[str, Any], trace: Trace) -> Response:
        given = safe_request_id(request.headers.get("x-request-id"))
        return _InferenceResponse(services, InferenceRequest(kind, raw, fields, request.headers, given), trace)

    return _counted_route(services, kind.route, respond, anthropic=kind.anthropic)


def _passing_route(services: Services, path: str) -> Any:
    def respond(request: Request, raw: bytes, fields: Mapping[str, Any], trace: Trace) -> Response:
        return _PassedOnResponse(services, request, raw, fields, trace)

    return _counted_route(services, path, respond, anthropic=path.startswith("/v1/messages"))


def _counted_route(
    services: Services,
    path: str,
    respond: Callable[[Request, bytes, Mapping[str, Any], Trace], Response],
    *,
    anthropic: bool,
) -> Any:
    """Return a handler that reads and checks the body, and counts the request where it goes no further."""
    clock = services.handoffs.clock

    async def handle(request: Request) -> Response:
        trace = Trace(path, clock())
        try:
            raw = await read_body(request, services.config.max_body_bytes)
            trace.began = clock()
            fields = parse_object(raw) if request.method == "POST" else {}
            refuse_transfer_fields(fields)
        except ProxyError as error:
            trace.outcome, trace.ended = "client_error", clock()
            services.metrics.observe(trace)
            return error_response(error, anthropic=anthropic)
        except ClientDisconnect:
            trace.outcome, trace.ended = "client_cancelled", clock()
            services.metrics.observe(trace)
            return Response(status_code=_CLIENT_ERROR)
        return respond(request, raw, fields, trace)

    return handle


class _WatchedResponse(Response):
    """Runs a request while it watches the client: one that leaves, in whatever phase, ends every engine call."""

    def __init__(self, services: Services, trace: Trace) -> None:
        super().__init__()
        self._services = services
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        work = asyncio.ensure_future(self._serve(send))
        gone = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                if not self._trace.complete:
                    self._trace.outcome = "client_cancelled"
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            error = None if work.cancelled() else work.exception()
            if error is not None:
                self._trace.outcome = "internal_error"
            self._trace.ended = self._services.handoffs.clock()
            self._services.metrics.observe(self._trace)
        if error is not None:
            raise error

    async def _serve(self, send: Send) -> None:
        raise NotImplementedError


class _InferenceResponse(_WatchedResponse):
    """Serves on a pair."""

    def __init__(self, services: Services, request: InferenceRequest, trace: Trace) -> None:
        super().__init__(services, trace)
        self._request = request

    async def _serve(self, send: Send) -> None:
        request, trace = self._request, self._trace
        own = {"x-request-id": request.client_request_id or new_request_id()}
        try:
            async with self._services.handoffs.serve(request, trace) as answer:
                own["x-pdcluster-path"] = f"{trace.path}; reason={trace.reason}" if trace.reason else trace.path
                trace.outcome = outcome_of(answer.status)
                await send_answer(answer, own, request.kind, send, trace, self._services.handoffs.clock)
        except ProxyError as error:
            trace.outcome = outcome_of(error.status)
            body = orjson.dumps(error_body(error, anthropic=request.kind.anthropic))
            headers = {"content-type": "application/json", **error.headers, **own}
            await send_whole(error.status, headers, body, send)


class _PassedOnResponse(_WatchedResponse):
    """Serves by one call to the ready decode endpoint with the fewest requests in flight."""

    def __init__(
        self, services: Services, request: Request, raw: bytes, fields: Mapping[str, Any], trace: Trace
    ) -> None:
        super().__init__(services, trace)
        self._request = request
        self._raw = raw
        self._fields = fields

    async def _serve(self, send: Send) -> None:
        request_id = safe_request_id(self._request.headers.get("x-request-id")) or new_request_id()
        own = {"x-request-id": request_id}
        try:
            reply = await self._ask()
        except ProxyError as error:
            self._trace.outcome = outcome_of(error.status)
            body = orjson.dumps(error_body(error, anthropic=self._trace.route.startswith("/v1/messages")))
            await send_whole(error.status, {"content-type": "application/json", **error.headers, **own}, body, send)
            return
        self._trace.outcome = outcome_of(reply.status)
        headers = {**headers_for_client(reply.headers), **own}
        await send_whole(reply.status, headers, clean_reply(reply.body, self._fields), send)

    async def _ask(self) -> EngineReply:
        services, path = self._services, self._trace.route
        ready = [endpoint for endpoint in services.handoffs.pools.of_role("decode") if endpoint.ready]
        if not ready:
            raise NoEndpointError("no decode endpoint is ready; /ready says what is missing")
        endpoint = min(ready, key=lambda item: item.in_flight)
        headers = headers_for_engine(self._request.headers, new_request_id(), services.config.engine_api_key)
        with endpoint.reserved():
            if self._request.method == "GET":
                return await services.client.get(endpoint, path, _CALL_LIMIT_S, headers)
            raw = without_transfer_fields(self._raw) if has_transfer_fields(self._fields) else self._raw
            return await services.client.call(endpoint, path, raw, headers, leg=path, limit=Limit(_CALL_LIMIT_S))


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body of at most `limit` bytes; one that says it is longer is refused before it is read.

    What a refused client still sends is dropped by the server as it comes: closing at once would cost it the answer.
    """
    message = f"the body is over {limit // (1 << 20)} MiB (--max-body-mb)"
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise BodyTooLargeError(message)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLargeError(message)
        parts.append(part)
    return b"".join(parts)


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

    async def metrics(self) -> Response:
        """Answer with the proxy's metrics and fresh KV transfer figures of the decode engines."""
        await self._services.watcher.scrape(self._services.metrics.kv_transfer)
        return Response(self._services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """Answer with the models of all ready decode endpoints, each once."""
        pools, client = self._services.handoffs.pools, self._services.client
        ready = [endpoint for endpoint in pools.of_role("decode") if endpoint.ready]
        if not ready:
            raise NoEndpointError("no decode endpoint is ready; /ready says what is missing")
        headers = headers_for_engine(request.headers, new_request_id(), self._services.config.engine_api_key)
        replies = await asyncio.gather(
            *(client.get(endpoint, "/v1/models", _CALL_LIMIT_S, headers) for endpoint in ready), return_exceptions=True
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
