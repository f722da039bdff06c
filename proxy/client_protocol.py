"""uvicorn's HTTP protocol and more: limits on slow clients, whole bodies, streams written straight to the socket.

A request's scope carries a `LinkedClient`, through which a stream goes from an engine's socket to the client's.
Everything else is uvicorn's: parsing, keep-alive, pipelining, the ASGI task, the head of the response.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.client import EXTENSION
from proxy.config import ClientLimits
from proxy.errors import (
    BadRequestError,
    HeadersTooLargeError,
    ProxyError,
    SlowClientError,
    error_body,
)
from proxy.linked_client import LinkedClient

# A body must come at this pace at least, measured over each `ClientLimits.body_seconds`.
_SLOWEST_BODY = 1024
_LINGER_S = 2.0
_GOODBYE_S = 0.5
# Requests that a client may send before their turn.
_PIPELINE = 16
_Awaited = Literal["head", "body", ""]


def protocol_class(limits: ClientLimits) -> type[asyncio.Protocol]:
    """Return the protocol with its limits, as uvicorn's `http` setting takes it."""
    return functools.partial(ClientProtocol, limits)  # type: ignore[return-value]


class ClientProtocol(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, limits: ClientLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._receiving: LinkedClient = None  # type: ignore[assignment]  # set before any body comes
        self._clients: deque[LinkedClient] = deque()  # the one that is served, then pipelined ones
        self._idle_since = 0.0
        self._in_head = False
        self._in_body = False
        self._awaited: _Awaited = ""
        self._head_size = 0
        self._body_seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._refusal: ProxyError | None = None
        self._refused = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client its time for a first request."""
        super().connection_made(transport)
        self._await("head")

    def data_received(self, data: bytes) -> None:
        """Parse, then see to what is still incomplete."""
        if self._refused:
            return
        self._head_size += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._in_head and self._head_size > self._limits.head_bytes:
            self.refuse(HeadersTooLargeError(f"the headers are over {self._limits.head_bytes} bytes"))
            return
        if not self._in_head:
            self._head_size = 0
        awaited: _Awaited = "head" if self._in_head else "body" if self._in_body else ""
        if awaited != self._awaited:
            self._await(awaited)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request's client."""
        super().connection_lost(exc)
        self._disarm()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._stalled is not None:
            self._stalled.cancel()
        for client in list(self._clients):
            client.left()

    def pause_writing(self) -> None:
        """Make the engine wait, but not for ever: a client that never reads would hold its KV."""
        super().pause_writing()
        if self._clients:
            self._clients[0].pause()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Let the engine go on."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._clients:
            self._clients[0].resume()

    # httptools

    def on_message_begin(self) -> None:
        """Note that a head has begun."""
        super().on_message_begin()
        self._in_head = True
        self._in_body = False

    def on_headers_complete(self) -> None:
        """Begin the request, its client in its scope."""
        self._in_head = False
        self._in_body = True
        if self._head_size > self._limits.head_bytes:  # else it cannot be
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._limits.head_bytes:
                self._refusal = HeadersTooLargeError(f"the headers are over {self._limits.head_bytes} bytes")
                raise self._refusal
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return  # an upgrade
        client = LinkedClient(self.cycle)
        self.scope["extensions"] = {EXTENSION: client}  # type: ignore[dict-item]
        self._clients.append(client)
        if len(self._clients) <= _PIPELINE:
            self.flow.resume_reading()  # a client is only known to have left while its socket is read
        self._receiving = client

    def on_body(self, body: bytes) -> None:
        """Gather up to the limit; what comes after the answer is dropped."""
        client = self._receiving
        client.size += len(body)
        if self.cycle.response_complete:
            return
        client.pieces.append(body)
        if client.size > self._limits.body_bytes:
            self.flow.pause_reading()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Note that the request is all there."""
        self._in_body = False
        super().on_message_complete()

    # uvicorn

    def on_response_complete(self) -> None:
        """Let a refused client send on for a moment only."""
        self._clients.popleft().part()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()
        if self._in_body:
            self._arm(_LINGER_S, self.transport.close)

    def _unset_keepalive_if_required(self) -> None:
        """Leave the timer armed: it looks whether the connection is idle, and one timer does for many requests."""

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for long enough, else look again when it could be."""
        idle = 0.0 if self._clients or self._in_head else self.loop.time() - self._idle_since
        if self.transport.is_closing():
            return
        if idle >= self.timeout_keep_alive:
            self.transport.close()
        else:
            left = self.timeout_keep_alive - idle
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)

    def shutdown(self) -> None:
        """End an idle connection; one with TLS doesn't wait long for its client's goodbye."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(_GOODBYE_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or what a callback refused."""
        self.refuse(self._refusal or BadRequestError(msg))

    def refuse(self, error: ProxyError) -> None:
        """Answer with an error, unless a response has begun, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = orjson.dumps(error_body(error, anthropic=False))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self._refused = True
        for client in list(self._clients):
            client.left()
        if self.transport.can_write_eof():  # closing at once could cost a client that still sends its answer
            self.transport.write_eof()
            self._arm(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    # Timers: one at a time, armed only where something stays incomplete.

    def _await(self, awaited: _Awaited) -> None:
        """Give the client its time for what is incomplete."""
        self._disarm()
        self._awaited = awaited
        if awaited == "head":
            self._arm(self._limits.head_seconds, self._head_is_late)
        elif awaited == "body":
            self._body_seen = self._receiving.size
            self._arm(self._limits.body_seconds, self._check_pace)

    def _arm(self, seconds: float, callback: Callable[[], object]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, callback)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._in_head:
            self.refuse(SlowClientError(f"the headers took over {self._limits.head_seconds:g} s"))
        else:
            self.transport.close()

    def _check_pace(self) -> None:
        self._timer = None
        if not self._in_body:
            return
        came = self._receiving.size - self._body_seen
        if came < _SLOWEST_BODY * self._limits.body_seconds and not self.flow.read_paused:
            self.refuse(SlowClientError(f"the body came at under {_SLOWEST_BODY} bytes a second"))
            return
        self._body_seen = self._receiving.size
        self._arm(self._limits.body_seconds, self._check_pace)
