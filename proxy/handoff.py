"""Prefill leg, handoff, decode leg: the only module that calls engines for a request.

A handoff is used once. A leg that fails before the client has got a byte is tried again once, with a new placement, a
new request id and a new prefill; an engine's 4xx goes to the client as it is, at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import orjson

from proxy.admission import Admission
from proxy.api_keys import ApiKey
from proxy.breathing import LARGE, breathe
from proxy.config import ProxyConfig
from proxy.connectors.base import Connector
from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineClient, EngineReply, EngineRequest
from proxy.errors import EngineFailedError, EngineTimeoutError, NoEndpointError
from proxy.exchange import Exchange, Limit
from proxy.firewall import (
    Authorization,
    RequestIds,
    clean_reply,
    has_transfer_fields,
    headers_for_client,
    headers_for_engine,
    without_transfer_fields,
)
from proxy.metrics import Metrics
from proxy.peek import RefusedEvent, first_events
from proxy.relay import Answer, EngineStream
from proxy.release import Releases
from proxy.request import InferenceRequest, why_aggregated
from proxy.scheduling.placement import Placement
from proxy.trace import Trace

_LOG = logging.getLogger("proxy.handoff")
_OK = 200
_CLIENT_ERROR, _SERVER_ERROR, _OVERLOADED = 400, 500, 503
# Of the lease; what is left is for decode to be reached and to send its first heartbeat.
_USABLE = 0.8
_UNLIMITED = Limit(None)


class Served(NamedTuple):
    """An answer and what gives back all that it holds."""

    answer: Answer
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Serves requests on pairs."""

    config: ProxyConfig
    pools: Pools
    admission: Admission
    connector: Connector
    client: EngineClient
    metrics: Metrics
    releases: Releases
    authorization: Authorization
    ids: RequestIds
    clock: Callable[[], float]

    async def serve(self, request: InferenceRequest, trace: Trace, key: ApiKey | None = None) -> Served:
        """Return the answer, its connection and reservations held until it is closed; raises `ProxyError`."""
        aggregated = why_aggregated(request.fields)
        if key is not None and key.priority:
            trace.priority = "first" if key.priority < 0 else "last"
        tried: set[str] = set()
        retried: set[str] = set()
        while True:
            placement = await self.admission.place(request, tried, aggregated, key)
            if placement is None:
                raise NoEndpointError("no decode endpoint is ready; /ready says what is missing")
            trace.placed = trace.placed or self.clock()
            run = _Attempt(self, request, placement, trace, retried)
            try:
                return Served(await run.answer(), run.close)
            except EngineTimeoutError:
                run.close()
                raise  # the time is spent; another attempt would double it
            except EngineFailedError:
                run.close()
                if run.leg in retried:
                    raise
                retried.add(run.leg)
                self.metrics.retries.inc(run.leg)
                tried.update(run.failed)
            except BaseException:
                run.close()
                raise

    def count_fallback(self, reason: str, trace: Trace) -> None:
        """Note that decode serves alone because prefill could not; refuse where the policy says so."""
        if self.config.fallback == "none":
            raise NoEndpointError(f"no prefill can serve this request ({reason}) and the fallback is off")
        trace.path, trace.reason = "aggregated", reason
        self.metrics.fallbacks.inc(reason)
        _LOG.warning("decode serves alone: %s", reason)


class _Attempt:
    """One try on one placement. `leg` is the one that runs; `failed` are endpoints that another try should avoid.

    `retried` are the legs that have had their second try: their failures are final.
    """

    def __init__(
        self,
        handoffs: Handoffs,
        request: InferenceRequest,
        placement: Placement,
        trace: Trace,
        retried: Collection[str],
    ) -> None:
        self._of = handoffs
        self._request = request
        self._placement = placement
        self._trace = trace
        self._retried = retried
        self._headers = headers_for_engine(request.headers, handoffs.ids.new(), handoffs.authorization)
        self._timeouts = handoffs.config.timeouts
        self._reserved = self._prefill_over = False
        self._stream: Exchange | None = None
        self._sent: Exchange | None = None  # the leg that an engine may know of
        self.failed: list[str] = []
        self.leg: Literal["prefill", "lease", "decode"] = "prefill"

    async def answer(self) -> Answer:
        """Run the legs; raises `EngineFailedError` where another attempt may help."""
        self._placement.decode.take()
        self._reserved = True
        self._trace.prefill_began = self._trace.prefill_ended = None
        if self._placement.prefill is None:
            self._count_alone(self._placement.reason)
            return await self._decode(self._alone_body())
        self._trace.path, self._trace.reason = "disaggregated", ""
        reply = await self._prefill(self._placement.prefill)
        told = {} if reply is None else _json_object(reply.body)
        self._trace.prompt_tokens = _prompt_tokens(told)
        self._tell_prefilled(well=reply is not None and reply.status < _CLIENT_ERROR)
        if reply is not None and reply.status >= _CLIENT_ERROR:
            return _passed_on(reply)
        handoff = self._of.connector.handoff(told)
        if handoff is None:
            self._of.count_fallback("prefill_failed" if reply is None else "no_handoff", self._trace)
            return await self._decode(self._alone_body())
        return await self._decode_with(handoff)

    def _tell_prefilled(self, *, well: bool) -> None:
        """Let the next request have this one's prefill engine."""
        if not self._prefill_over:
            self._prefill_over = True
            self._of.admission.prefilled(self._placement, self._trace.prompt_tokens, well=well)

    def close(self) -> None:
        """Give back the decode connection and the reservations."""
        if self._stream is not None:
            self._stream.close()
        self._tell_prefilled(well=False)
        if self._reserved:
            self._reserved = False
            self._placement.decode.give()
            self._of.admission.finished(self._placement, self._trace.pace)

    def _limit(self, seconds: float | None) -> Limit:
        """Return a phase's limit, or what is left of the whole request's where that is less."""
        total = self._timeouts.total
        if total is None:
            return _UNLIMITED if seconds is None else Limit(seconds)
        left = max(0.0, self._trace.began + total - self._of.clock())
        return Limit(left, total) if seconds is None or left < seconds else Limit(seconds)

    def _count_alone(self, reason: str) -> None:
        if reason == "no_prefill":
            self._of.count_fallback(reason, self._trace)
        else:
            self._trace.path, self._trace.reason = "aggregated", reason
            self._of.metrics.aggregated.inc(reason)

    async def _prefill(self, prefill: Endpoint) -> EngineReply | None:
        """Return prefill's reply, None where it failed for the last time and decode may serve alone."""
        body = self._of.connector.prefill_body(self._request)
        if len(body) > LARGE:
            await breathe()
        self._trace.prefill_began = self._of.clock()
        asked = EngineRequest(
            self._request.kind.route, body, self._headers, "POST", True, self._note_sent, self._left_prefill
        )
        prefill.take()
        try:
            reply = await self._of.client.call(prefill, asked, leg="prefill", limit=self._limit(self._timeouts.prefill))
        except EngineFailedError as error:
            self._prefill_failed(prefill, error)
            return None
        finally:
            prefill.give()
        if reply.status >= _SERVER_ERROR:
            self._prefill_failed(prefill, _answered("prefill", prefill, reply.status))
            return None
        self._trace.prefill_ended = self._of.clock()
        self._of.pools.succeeded(prefill)
        return reply

    def _prefill_failed(self, prefill: Endpoint, error: EngineFailedError) -> None:
        """Raise where another try may help, or none would; return where decode may serve alone."""
        self._note_failure(prefill, error)
        if "prefill" not in self._retried or isinstance(error, EngineTimeoutError):
            raise error

    async def _decode_with(self, handoff: Mapping[str, Any]) -> Answer:
        """Run the decode leg. KV that decode never heard of is released; with the rest decode deals itself."""
        self._sent = None
        try:
            body, tail = self._of.connector.decode_body(self._request, handoff)
            if len(body) > LARGE:
                await breathe()
            self._refuse_stale()
            return await self._decode(body, tail)
        except EngineFailedError as error:
            died = self._went_silent() and not isinstance(error, EngineTimeoutError)
            if died or self.leg == "lease":
                self._of.metrics.stranded.inc()
            raise
        finally:
            if self._sent is None and self.leg != "lease":
                self._release(handoff)

    def _went_silent(self) -> bool:
        return self._sent is not None and not self._sent.status

    def _asked(self, body: bytes | memoryview, tail: bytes = b"") -> EngineRequest:
        return EngineRequest(self._request.kind.route, body, self._headers, on_sent=self._note_sent, tail=tail)

    def _note_sent(self, exchange: Exchange) -> None:
        self._sent = exchange

    def _left_prefill(self, exchange: Exchange) -> None:
        """Hear that the client left during prefill: an answer that is on its way still holds KV."""
        self._of.releases.expect(exchange, lambda body: self._release(self._of.connector.handoff(_json_object(body))))

    def _release(self, handoff: Mapping[str, Any] | None) -> None:
        """Have KV freed that nobody will fetch."""
        if handoff is not None:
            body = self._of.connector.release_body(self._request, handoff)
            self._of.releases.begin(self._placement.decode, body, self._headers)

    def _refuse_stale(self) -> None:
        """Raise where prefill may have freed the KV by the time decode asks for it: decode would answer nonsense."""
        self.leg = "lease"
        ended = self._trace.prefill_ended
        age = 0.0 if ended is None else self._of.clock() - ended
        if age >= self._of.config.lease_seconds * _USABLE:
            raise EngineFailedError(f"handoff: dropped after {age:.1f} s, prefill's lease is nearly over")

    async def _decode(self, body: bytes | memoryview, tail: bytes = b"") -> Answer:
        self.leg = "decode"
        decode = self._placement.decode
        try:
            answer = await (self._decode_stream if self._request.stream else self._decode_whole)(
                self._asked(body, tail)
            )
            if answer.status >= _SERVER_ERROR:
                failure = _answered("decode", decode, answer.status)
                if "decode" not in self._retried:
                    raise failure
                self._note_failure(decode, failure)
                return answer
        except EngineFailedError as error:
            self._note_failure(decode, error)
            raise
        self._of.pools.succeeded(decode)
        return answer

    async def _decode_whole(self, asked: EngineRequest) -> Answer:
        reply = await self._of.client.call(
            self._placement.decode, asked, leg="decode", limit=self._limit(self._timeouts.headers)
        )
        self._trace.first_byte = self._of.clock()
        return _passed_on(reply, clean_reply(reply.body, self._request.fields))

    async def _decode_stream(self, asked: EngineRequest) -> Answer:
        exchange = await self._of.client.open(
            self._placement.decode, asked, leg="decode", limit=self._limit(self._timeouts.headers)
        )
        self._stream = exchange
        if exchange.status != _OK or not exchange.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            return await self._gathered(exchange)
        try:
            head = await first_events(lambda: exchange.take(self._limit(self._timeouts.headers)), self._request.kind)
        except RefusedEvent as refused:
            return Answer(refused.status, {"content-type": "application/json"}, refused.body)
        self._trace.first_byte = self._of.clock()
        if self._trace.prefill_ended is not None:
            self._of.admission.began(self._placement, self._trace.first_byte - self._trace.prefill_ended)
        rest = EngineStream(exchange, lambda: self._limit(self._timeouts.idle))
        return Answer(_OK, headers_for_client(exchange.headers), head, rest)

    async def _gathered(self, exchange: Exchange) -> Answer:
        """Return an answer that is no stream, though one was asked for: errors mostly."""
        body = await exchange.whole(self._limit(self._timeouts.idle), self._of.clock())
        reply = EngineReply(exchange.status, exchange.headers, body)
        return _passed_on(reply, clean_reply(body, self._request.fields))

    def _alone_body(self) -> bytes:
        """Return the client's bytes; written anew only to drop a transfer field that was null."""
        if has_transfer_fields(self._request.fields):
            return without_transfer_fields(self._request.raw)
        return self._request.raw

    def _note_failure(self, endpoint: Endpoint, error: EngineFailedError) -> None:
        self.failed.append(endpoint.name)
        if error.counts:
            self._of.pools.failed(endpoint, error.summary, fatal=error.refused)
        _LOG.warning("%s (%s)", error.summary, endpoint.name)


def _answered(leg: str, endpoint: Endpoint, status: int) -> EngineFailedError:
    """Return the error for a 5xx; 503 is how an engine says that it is full, which is no sign of ill health."""
    return EngineFailedError(f"{leg}: {endpoint.name} answered {status}", counts=status != _OVERLOADED)


def _passed_on(reply: EngineReply, body: bytes | None = None) -> Answer:
    return Answer(reply.status, headers_for_client(reply.headers), reply.body if body is None else body)


def _prompt_tokens(reply: Mapping[str, Any]) -> int | None:
    """Return the prompt's tokens by an answer's usage, which two of the APIs call input tokens."""
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return None
    tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
    return tokens if isinstance(tokens, int) else None


def _json_object(body: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
