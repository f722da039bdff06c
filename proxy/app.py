"""Put the parts together: config -> FastAPI application."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.admission import Admission, QueueLimits
from proxy.config import ProxyConfig
from proxy.connectors import CONNECTORS
from proxy.endpoints import Endpoint, Pools, State
from proxy.engine_client import EngineClient
from proxy.errors import MethodNotAllowedError, NotFoundError, ProxyError
from proxy.firewall import Authorization, RequestIds, headers_for_engine
from proxy.gate import Gate
from proxy.handoff import Handoffs
from proxy.inference import Route, Services
from proxy.load import Watcher
from proxy.metrics import COLUMNS as METRIC_COLUMNS
from proxy.metrics import Metrics
from proxy.rate_limits import COLUMNS_PER_KEY, RateLimits
from proxy.release import Releases
from proxy.request import KINDS, PASSED_ON, InferenceRequest
from proxy.routes import error_response, hot_routes, make_router
from proxy.scheduling.dispatcher import Dispatcher
from proxy.scheduling.job import Targets
from proxy.scheduling.lanes import Lanes
from proxy.scheduling.prefix_index import PrefixIndex
from proxy.scheduling.seats import Rooms
from proxy.scheduling.shared_load import SharedLoad
from proxy.shared_counts import SharedCounts
from proxy.trace import outcome_of

if TYPE_CHECKING:
    from proxy.kv_events.following import KvEvents
    from proxy.tokens import Tokenizer

_LOG = logging.getLogger("proxy")
_METHOD_NOT_ALLOWED = 405
_RELEASES_S = 2.0
_FIRST_LOOK_S = 2.0
_CHARACTERS_PER_TOKEN = 4


class _Application(FastAPI):
    """FastAPI, with the routes that carry the load in front of its layers. They are known to it as well.

    `direct` are those that our own server may call without ASGI: none where a middleware has to see them.
    """

    def __init__(self, hot: Mapping[str, Route], cors_origins: Sequence[str], **settings: Any) -> None:
        super().__init__(**settings)
        self._hot = {path: route for path, route in hot.items() if "POST" in PASSED_ON.get(path, ("POST",))}
        self.direct = {} if cors_origins else {path.encode(): route for path, route in self._hot.items()}
        self._entry: ASGIApp = self._dispatch
        if cors_origins:
            self._entry = CORSMiddleware(
                self._dispatch,
                allow_origins=cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "x-pdcluster-path", "retry-after"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._hot.get(scope["path"])
            if route is not None:
                await route(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def shared_counts(config: ProxyConfig, workers: int) -> SharedCounts:
    """Return the table that the workers of a proxy share: load of endpoints, what API keys have used, metrics."""
    return SharedCounts(_first_of_metrics(config) + METRIC_COLUMNS, workers, volatile=_first_of_keys(config))


def _first_of_keys(config: ProxyConfig) -> int:
    """Return the column after those of the load: requests in flight, tokens to prefill, requests that wait."""
    return 2 * len(config.endpoints) + 1


def _first_of_metrics(config: ProxyConfig) -> int:
    keys = 0 if config.api_keys is None else len(config.api_keys)
    return _first_of_keys(config) + keys * COLUMNS_PER_KEY


def create_app(
    config: ProxyConfig,
    rng: random.Random | None = None,
    counts: SharedCounts | None = None,
    kv_store: Path | None = None,
) -> FastAPI:
    """Return the application; it starts probing engines when it starts and closes its connections when it ends.

    `counts` is the table shared with other workers, `kv_store` the file in which they keep the engines' KV transfer
    figures; None for a proxy of one process.
    """
    rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
    services = _make_services(config, rng, counts or shared_counts(config, 1), kv_store)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(services.watcher.run())]
        if services.kv_events is not None:
            tasks.append(asyncio.create_task(services.kv_events.run()))
        await services.watcher.looked_once(_FIRST_LOOK_S)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await services.handoffs.releases.finish(_RELEASES_S)
            services.client.close()

    hot = hot_routes(services)
    settings = {"title": "pdcluster", "docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = _Application(hot, config.cors_origins, lifespan=lifespan, **settings)
    app.state.metrics = services.metrics
    app.state.services = services
    app.include_router(make_router(services, hot))
    app.add_exception_handler(ProxyError, _answer_proxy_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_bug)
    return app


def _make_services(config: ProxyConfig, rng: random.Random, counts: SharedCounts, kv_store: Path | None) -> Services:
    """Put together what the routes work with."""
    endpoints = tuple(Endpoint(item, counts=counts, column=index) for index, item in enumerate(config.endpoints))
    pools = Pools(endpoints, config.excluded_pairs, _log_change)
    client = EngineClient(config.timeouts)
    metrics = Metrics(
        endpoints, counts, _first_of_metrics(config), kv_store, lambda: counts.total(_first_of_keys(config) - 1)
    )
    authorization = Authorization(config.engine_api_key, pass_on=config.api_keys is None)
    ids = RequestIds()
    probe_headers = headers_for_engine({}, "probe", authorization)
    handoffs = Handoffs(
        config=config,
        pools=pools,
        admission=_make_admission(config, pools, metrics, rng),
        connector=CONNECTORS[config.connector](),
        client=client,
        metrics=metrics,
        releases=Releases(client, pools, metrics),
        authorization=authorization,
        ids=ids,
        clock=time.monotonic,
    )
    return Services(
        config=config,
        handoffs=handoffs,
        client=client,
        watcher=Watcher(pools, client, config.health_interval, probe_headers, time.monotonic),
        metrics=metrics,
        gate=Gate(config.api_keys, RateLimits(counts, _first_of_keys(config), time.time), metrics),
        authorization=authorization,
        ids=ids,
        kv_events=_kv_events(config, endpoints, client, probe_headers, metrics) if config.kv_events else None,
        tokenizer=_tokenizer(handoffs) if config.kv_events else None,
    )


def _make_admission(config: ProxyConfig, pools: Pools, metrics: Metrics, rng: random.Random) -> Admission:
    """Put together what places requests."""
    told = config.scheduling
    lanes, rooms, index = Lanes(), Rooms(rng, told.tpot_ms / 1000), PrefixIndex()
    for number, endpoint in enumerate(pools.endpoints):
        if endpoint.role == "prefill":
            lanes.add(endpoint.name, number)
            index.limit(number, round(told.prefix_tokens * _CHARACTERS_PER_TOKEN))
        else:
            rooms.add(endpoint.name, told.seats)
    targets = Targets(base=told.ttft_ms / 1000, each=told.ttft_per_token_ms / 1000)
    dispatcher = Dispatcher(lanes, rooms, index, rng, targets, config.excluded_pairs)
    shared = SharedLoad(pools.endpoints, dispatcher, len(pools.endpoints))
    limits = QueueLimits(told.queue_size, told.queue_seconds)
    return Admission(dispatcher, pools, shared, limits, metrics, time.monotonic)


def _kv_events(
    config: ProxyConfig, endpoints: Sequence[Endpoint], client: EngineClient, headers: bytes, metrics: Metrics
) -> KvEvents:
    """Follow engines' KV events; what that needs is loaded only where it is asked for."""
    from proxy.kv_events.collector import KvEventsCollector  # noqa: PLC0415
    from proxy.kv_events.following import Followed, KvEvents  # noqa: PLC0415
    from proxy.scheduling.block_index import BlockIndex  # noqa: PLC0415

    events = KvEvents(Followed(endpoints, config.kv_events), BlockIndex(), client, headers, time.monotonic)
    metrics.add(KvEventsCollector(events, endpoints))
    return events


def _tokenizer(handoffs: Handoffs) -> Tokenizer:
    """Ask engines for the tokens by which their KV blocks are found."""
    from proxy.tokens import Tokenizer, Tokenizing  # noqa: PLC0415

    def headers(request: InferenceRequest) -> bytes:
        return headers_for_engine(request.headers, handoffs.ids.new(), handoffs.authorization)

    count = handoffs.metrics.tokenizations.inc
    return Tokenizer(handoffs.pools, handoffs.client, headers, handoffs.clock, count, Tokenizing())


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
    metrics.requests.inc("other", outcome_of(error.status))
    return error_response(error, anthropic=_is_anthropic(request))


def _is_anthropic(request: Request) -> bool:
    kind = KINDS.get(request.url.path)
    return kind is not None and kind.anthropic


def _log_change(endpoint: Endpoint, before: State) -> None:
    level = logging.WARNING if endpoint.state == "unhealthy" else logging.INFO
    _LOG.log(level, "%s: %s -> %s %s", endpoint.name, before, endpoint.state, endpoint.reason)
