"""Put the parts together: config -> FastAPI application."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.config import ProxyConfig
from proxy.connectors import CONNECTORS
from proxy.endpoints import Endpoint, Pools, State
from proxy.engine_client import EngineClient
from proxy.errors import MethodNotAllowedError, NotFoundError, ProxyError
from proxy.firewall import Authorization, headers_for_engine
from proxy.gate import Gate
from proxy.handoff import Handoffs
from proxy.inference import Services
from proxy.load import Watcher
from proxy.metrics import Metrics
from proxy.release import Releases
from proxy.request import KINDS
from proxy.routes import error_response, hot_routes, make_router
from proxy.scheduling.pickers import BestPicker
from proxy.scheduling.profile import Scheduler
from proxy.trace import outcome_of

_LOG = logging.getLogger("proxy")
_METHOD_NOT_ALLOWED = 405
_RELEASES_S = 2.0


class _Application(FastAPI):
    """FastAPI, with the routes that carry the load in front of its layers. They are known to it as well."""

    def __init__(self, hot: Mapping[str, ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._hot = hot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._hot.get(scope["path"])
            if route is not None:
                await route(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def create_app(config: ProxyConfig, rng: random.Random | None = None) -> FastAPI:
    """Return the application; it starts probing engines when it starts and closes its connections when it ends."""
    endpoints = tuple(Endpoint(item) for item in config.endpoints)
    pools = Pools(endpoints, config.excluded_pairs, _log_change)
    client = EngineClient(config.timeouts)
    metrics = Metrics(endpoints)
    authorization = Authorization(config.engine_api_key)
    releases = Releases(client, pools, metrics)
    watcher = Watcher(
        pools, client, config.health_interval, headers_for_engine({}, "probe", authorization), time.monotonic
    )
    handoffs = Handoffs(
        config=config,
        pools=pools,
        scheduler=Scheduler(pools, BestPicker(rng or random.Random())),  # noqa: S311 - spreads load, guards nothing
        connector=CONNECTORS[config.connector](),
        client=client,
        metrics=metrics,
        releases=releases,
        authorization=authorization,
        clock=time.monotonic,
    )
    services = Services(config, handoffs, client, watcher, metrics, Gate(), authorization)
    hot = hot_routes(services)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(watcher.run())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await releases.finish(_RELEASES_S)
            client.close()

    app = _Application(hot, title="pdcluster", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.metrics = metrics
    app.include_router(make_router(services, hot))
    app.add_exception_handler(ProxyError, _answer_proxy_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_bug)
    return app


async def _answer_proxy_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ProxyError):
        raise TypeError(type(error))
    return _counted(request, error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer what Starlette's router refuses: no such route, or no such method on it."""
    if not isinstance(error, HTTPException):
        raise TypeError(type(error))
    ours: ProxyError
    if error.status_code == _METHOD_NOT_ALLOWED:
        ours = MethodNotAllowedError(f"{request.method} is not allowed here", headers=dict(error.headers or {}))
    else:
        ours = NotFoundError("there is no such route; /v1/chat/completions is one", code="unknown_route")
    return _counted(request, ours)


async def _answer_bug(request: Request, error: Exception) -> Response:
    _LOG.error("bug while answering %s", request.url.path, exc_info=error)
    return error_response(ProxyError("the router failed; its log says why"), anthropic=_is_anthropic(request))


def _counted(request: Request, error: ProxyError) -> Response:
    """Answer an error outside the routes that count for themselves."""
    metrics: Metrics = request.app.state.metrics
    metrics.requests.labels("other", outcome_of(error.status)).inc()
    return error_response(error, anthropic=_is_anthropic(request))


def _is_anthropic(request: Request) -> bool:
    kind = KINDS.get(request.url.path)
    return kind is not None and kind.anthropic


def _log_change(endpoint: Endpoint, before: State) -> None:
    level = logging.WARNING if endpoint.state == "unhealthy" else logging.INFO
    _LOG.log(level, "%s: %s -> %s %s", endpoint.name, before, endpoint.state, endpoint.reason)
