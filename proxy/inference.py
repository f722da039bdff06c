"""Requests that engines serve: on pairs, or passed to one decode endpoint. ASGI applications, one a route.

Each watches its client all the while: one that leaves, in whatever phase, ends every engine call of the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from proxy.breathing import LARGE, breathe
from proxy.client import Client, ClientGoneError, Receive, Scope, Send, client_of, declared_length, header_map
from proxy.config import ProxyConfig
from proxy.engine_client import EngineClient, EngineReply, EngineRequest
from proxy.errors import STOPPED, NoEndpointError, ProxyError, error_body
from proxy.exchange import Limit
from proxy.firewall import (
    Authorization,
    RequestIds,
    clean_reply,
    has_transfer_fields,
    headers_for_client,
    headers_for_engine,
    refuse_transfer_fields,
    safe_request_id,
    without_transfer_fields,
)
from proxy.gate import Gate, Pass
from proxy.handoff import Handoffs
from proxy.load import Watcher
from proxy.metrics import Metrics
from proxy.relay import send_answer
from proxy.request import ApiKind, InferenceRequest, parse_object
from proxy.trace import Trace, outcome_of

if TYPE_CHECKING:
    from proxy.kv_events.following import KvEvents
    from proxy.tokens import Tokenizer

_LOG = logging.getLogger("proxy.inference")
CALL_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Services:
    """What the routes work with; made once by `create_app`."""

    config: ProxyConfig
    handoffs: Handoffs
    client: EngineClient
    watcher: Watcher
    metrics: Metrics
    gate: Gate
    authorization: Authorization
    ids: RequestIds
    kv_events: KvEvents | None = None  # where --kv-events asks for them, and with them the tokens of prompts
    tokenizer: Tokenizer | None = None


class Call(NamedTuple):
    """A request that may be served: `raw` is the client's body to the byte, `fields` the same parsed."""

    client: Client
    method: str
    headers: Mapping[bytes, bytes]
    raw: bytes
    fields: Mapping[str, Any]
    trace: Trace
    admitted: Pass
    own: Mapping[str, str]  # headers of the answer


class Route:
    """One route: reads and checks a request, has it served, and counts it once, however it ends."""

    def __init__(self, services: Services, path: str, *, anthropic: bool) -> None:
        self._services = services
        self._path = path
        self._anthropic = anthropic
        self._clock = services.handoffs.clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request that comes by ASGI."""
        await self.serve(client_of(scope, receive, send), scope["method"], header_map(scope))

    async def serve(self, client: Client, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Serve one request."""
        trace = Trace(self._path, self._clock())
        own = {"x-request-id": safe_request_id(headers.get(b"x-request-id")) or self._services.ids.new()}
        try:
            call = await self._read(client, method, headers, trace, own)
            task = asyncio.current_task()
            client.when_gone(None if task is None else task.cancel)
            await self._serve(call)
        except ProxyError as error:
            trace.outcome = outcome_of(error.status)
            await self._refuse(error, own, client)
        except ClientGoneError:
            trace.outcome = "client_cancelled"
        except asyncio.CancelledError:
            if not client.gone:
                trace.outcome = "unavailable"
                if not trace.answering:
                    await self._refuse(NoEndpointError(STOPPED), own, client)
                raise
            if not trace.complete:
                trace.outcome = "client_cancelled"
        except Exception:
            trace.outcome = "internal_error"
            if trace.answering:
                raise
            _LOG.exception("bug while answering %s", self._path)
            await self._refuse(ProxyError("the router failed; its log says why"), own, client)
        finally:
            client.when_gone(None)
            trace.ended = self._clock()
            self._services.metrics.observe(trace)

    async def _read(
        self, client: Client, method: str, headers: Mapping[bytes, bytes], trace: Trace, own: Mapping[str, str]
    ) -> Call:
        """Admit by the headers, then read and check the body."""
        services = self._services
        declared = declared_length(headers)
        admitted = services.gate.admit(headers, declared)
        raw = await client.body(services.config.limits.body_bytes, declared)
        trace.began = self._clock()
        if len(raw) > LARGE:
            await breathe()
        fields = parse_object(raw) if method == "POST" else {}
        if len(raw) > LARGE:
            await breathe()
        refuse_transfer_fields(fields)
        return Call(client, method, headers, raw, fields, trace, admitted, own)

    async def _serve(self, call: Call) -> None:
        raise NotImplementedError

    async def _refuse(self, error: ProxyError, own: Mapping[str, str], client: Client) -> None:
        body = orjson.dumps(error_body(error, anthropic=self._anthropic))
        headers = {"content-type": "application/json", **error.headers, **own}
        await client.respond(error.status, headers, body)


class InferenceRoute(Route):
    """Serves on a pair."""

    def __init__(self, services: Services, kind: ApiKind) -> None:
        super().__init__(services, kind.route, anthropic=kind.anthropic)
        self._kind = kind

    async def _serve(self, call: Call) -> None:
        trace, handoffs = call.trace, self._services.handoffs
        request = InferenceRequest(self._kind, call.raw, call.fields, call.headers)
        served = None
        try:
            served = await handoffs.serve(request, trace, call.admitted.key)
            path = f"{trace.path}; reason={trace.reason}" if trace.reason else trace.path
            trace.outcome = outcome_of(served.answer.status)
            trace.answering = True
            own = {**call.own, "x-pdcluster-path": path}
            await send_answer(served.answer, own, self._kind, call.client, trace, self._clock)
        finally:
            if served is not None:
                served.close()
            call.admitted.settle(trace, b"" if served is None else served.answer.body)


class PassedOnRoute(Route):
    """Serves by one call to the ready decode endpoint with the fewest requests in flight."""

    def __init__(self, services: Services, path: str) -> None:
        super().__init__(services, path, anthropic=path.startswith("/v1/messages"))

    async def _serve(self, call: Call) -> None:
        reply = await self._ask(call)
        call.trace.outcome = outcome_of(reply.status)
        call.trace.answering = True
        headers = {**headers_for_client(reply.headers), **call.own}
        await call.client.respond(reply.status, headers, clean_reply(reply.body, call.fields))

    async def _ask(self, call: Call) -> EngineReply:
        services = self._services
        ready = services.handoffs.pools.ready("decode")
        if not ready:
            raise NoEndpointError("no decode endpoint is ready; /ready says what is missing")
        endpoint = min(ready, key=lambda item: item.in_flight)
        headers = headers_for_engine(call.headers, services.ids.new(), services.authorization)
        with endpoint.reserved():
            if call.method == "GET":
                return await services.client.get(endpoint, self._path, CALL_LIMIT_S, headers)
            raw = without_transfer_fields(call.raw) if has_transfer_fields(call.fields) else call.raw
            request = EngineRequest(self._path, raw, headers, replayable=True)
            return await services.client.call(endpoint, request, leg=self._path, limit=Limit(CALL_LIMIT_S))
