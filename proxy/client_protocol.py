"""uvicorn's HTTP protocol and more: limits on slow clients, whole bodies, streams written straight to the socket.

A request's scope carries a `LinkedClient`, through which a stream goes from an engine's socket to the client's.
Everything else is uvicorn's: parsing, keep-alive, pipelining, the ASGI task, the head of the response.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from proxy.client import EXTENSION, ClientGoneError, Send, Transform, declared_length, header_map, refuse_longer
from proxy.config import ClientLimits
from proxy.errors import (
    BadRequestError,
    EngineFailedError,
    HeadersTooLargeError,
    ProxyError,
    SlowClientError,
    error_body,
)
from proxy.exchange import Exchange, Limit

# A body must come at this pace at least, measured over each `ClientLimits.body_seconds`.
_SLOWEST_BODY = 1024
_LINGER_S = 2.0
_GOODBYE_S = 0.5
_WITHOUT_CHUNKS = "1.0"
# Requests that a client may send before their turn.
_PIPELINE = 16
_Awaited = Literal["head", "body", ""]


def protocol_class(limits: ClientLimits) -> type[asyncio.Protocol]:
    """Return the protocol with its limits, as uvicorn's `http` setting takes it."""
    return functools.partial(ClientProtocol, limits)  # type: ignore[return-value]


class LinkedClient:
    """A request's client: the socket itself. See `client.Client`."""

    __slots__ = ("_begun", "_callback", "_cycle", "_exchange", "gone", "pieces", "send", "size")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.send: Send = cycle.send  # type: ignore[assignment]
        self.gone = False
        self.pieces: list[bytes] = []  # of the body, and their size
        self.size = 0
        self._begun = b""
        self._cycle = cycle
        self._callback: Callable[[], object] | None = None
        self._exchange: Exchange | None = None

    async def body(self, limit: int) -> bytes:
        """Return the whole body; one that says that it is too long is refused before it is read.

        What a refused client still sends is dropped as it comes: closing at once would cost it the answer.
        """
        cycle = self._cycle
        refuse_longer(declared_length(header_map(cycle.scope)), limit)  # type: ignore[arg-type]
        if cycle.waiting_for_100_continue:
            cycle.waiting_for_100_continue = False
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while cycle.more_body and self.size <= limit and not cycle.disconnected:
            cycle.message_event.clear()
            await cycle.message_event.wait()
        if cycle.disconnected:
            raise ClientGoneError
        refuse_longer(self.size, limit)
        pieces, self.pieces = self.pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def when_gone(self, callback: Callable[[], object] | None) -> None:
        """Have a callback called when the client leaves; at once where it has left."""
        self._callback = callback
        if self.gone and callback is not None:
            callback()

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Write a whole response at once."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(_head(cycle, status, headers, b"content-length: %d\r\n\r\n" % len(body)) + body)
            _complete(cycle)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a response; its head leaves together with the first bytes of its body."""
        cycle = self._cycle
        if cycle.scope["http_version"] == _WITHOUT_CHUNKS:
            cycle.keep_alive = False  # the end of the connection is that of the body
            self._begun = _head(cycle, status, headers, b"\r\n")
        else:
            self._begun = _head(cycle, status, headers, b"transfer-encoding: chunked\r\n\r\n")

    async def relay(self, head: bytes, exchange: Exchange, idle: Callable[[], Limit], transform: Transform) -> None:
        """Write a stream to the socket as it comes from the engine's, to its end."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        done = asyncio.get_running_loop().create_future()
        splice = _Splice(cycle, transform, done)
        splice.begin(self._begun, head)
        self._exchange = exchange
        if cycle.flow.write_paused:
            exchange.pause()
        try:
            exchange.pipe(splice, idle)
            await done
        finally:
            self._exchange = None

    # What the protocol tells.

    def part(self) -> None:
        """Let go of the scope, in which this client stands: what refers to itself only a slow collection would free."""
        self._cycle.scope.pop("extensions", None)

    def left(self) -> None:
        """Hear that the connection is closed."""
        if not self._cycle.response_complete:
            self.gone = True
            self._cycle.disconnected = True
            self._cycle.message_event.set()
            if self._callback is not None:
                self._callback()

    def pause(self) -> None:
        """Hear that the client reads too slowly."""
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        """Hear that it has read."""
        if self._exchange is not None:
            self._exchange.resume()


class _Splice:
    """The end of a stream that lies in the client's socket."""

    __slots__ = ("_chunked", "_cycle", "_done", "_pass", "_transform", "_write")

    def __init__(self, cycle: RequestResponseCycle, transform: Transform, done: asyncio.Future[None]) -> None:
        self._cycle = cycle
        self._transform = transform
        self._pass = transform.feed
        self._done = done
        self._write = cycle.transport.write
        self._chunked = cycle.scope["http_version"] != _WITHOUT_CHUNKS

    def begin(self, head: bytes, data: bytes) -> None:
        """Write the head of the response and the first bytes of its body."""
        if not self._cycle.disconnected:
            self._write(head + self._framed(self._pass(data)))

    def feed(self, data: bytes) -> None:
        """Write the next bytes."""
        if not self._cycle.disconnected:
            data = self._pass(data)
            if data:
                self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self, error: EngineFailedError | None) -> None:
        """Write what is left and end the response."""
        data = self._transform.end(error)
        if not self._cycle.disconnected:
            self._write(self._framed(data) + (b"0\r\n\r\n" if self._chunked else b""))
            _complete(self._cycle)
        if not self._done.done():
            self._done.set_result(None)

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._chunked else data


def _head(cycle: RequestResponseCycle, status: int, headers: Mapping[str, str], framing: bytes) -> bytes:
    """Return the head of a response as uvicorn's own `send` would write it."""
    cycle.response_started = True
    cycle.waiting_for_100_continue = False
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1")
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise ValueError("a header value holds a line break")
    default = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
    close = b"" if cycle.keep_alive else b"connection: close\r\n"
    return STATUS_LINE[status] + default + lines + close + framing


def _complete(cycle: RequestResponseCycle) -> None:
    """End a response as uvicorn's own `send` does."""
    cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


class ClientProtocol(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, limits: ClientLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._receiving: LinkedClient = None  # type: ignore[assignment]  # set before any body comes
        self._clients: deque[LinkedClient] = deque()  # the one that is served, then pipelined ones
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
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._arm(_LINGER_S, self.transport.close)

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
