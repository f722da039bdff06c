"""A client under our own server: streams go to its socket straight from an engine's, without a `send` a chunk.

What it writes is what uvicorn's own `send` would; see `client.Client` for what each method promises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from proxy.client import ClientGoneError, Send, Transform, refuse_longer
from proxy.errors import STOPPED, EngineFailedError
from proxy.exchange import Exchange, Limit


class _Nobody:
    """Stands where uvicorn's own cycle has an event."""

    def set(self) -> None:
        """Tell nobody."""


class Turn:
    """The state of a request that is served without ASGI: what the protocol needs of uvicorn's cycle, and no more."""

    __slots__ = (
        "default_headers",
        "disconnected",
        "flow",
        "keep_alive",
        "more_body",
        "on_response",
        "response_complete",
        "response_started",
        "transport",
        "waiting_for_100_continue",
    )
    message_event = _Nobody()

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        default_headers: Sequence[tuple[bytes, bytes]],
        on_response: Callable[[], None],
        *,
        keep_alive: bool,
        expects_100: bool,
    ) -> None:
        self.transport = transport
        self.flow = flow
        self.default_headers = default_headers
        self.on_response = on_response
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_100
        self.disconnected = self.response_started = self.response_complete = False
        self.more_body = True


class LinkedClient:
    """A request's client: the socket itself. See `client.Client`."""

    __slots__ = (
        "_begun",
        "_callback",
        "_chunked",
        "_cycle",
        "_exchange",
        "_scope",
        "_waiter",
        "gone",
        "pieces",
        "send",
        "size",
    )

    def __init__(
        self, cycle: RequestResponseCycle | Turn, *, chunked: bool, send: Send | None = None, scope: Scope | None = None
    ) -> None:
        self.send = send  # of the ASGI scope in which it stands, if it does
        self.gone = False
        self.pieces: list[bytes] = []  # of the body, and their size
        self.size = 0
        self._begun = b""
        self._chunked = chunked
        self._cycle = cycle
        self._scope = scope
        self._callback: Callable[[], object] | None = None
        self._exchange: Exchange | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def body(self, limit: int, declared: int) -> bytes:
        """Return the whole body; one that says that it is too long is refused before it is read.

        What a refused client still sends is dropped as it comes: closing at once would cost it the answer.
        """
        cycle = self._cycle
        refuse_longer(declared, limit)
        if cycle.waiting_for_100_continue:
            cycle.waiting_for_100_continue = False
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while cycle.more_body and self.size <= limit and not cycle.disconnected:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
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
        if self._chunked:
            self._begun = _head(cycle, status, headers, b"transfer-encoding: chunked\r\n\r\n")
        else:
            cycle.keep_alive = False  # the end of the connection is that of the body
            self._begun = _head(cycle, status, headers, b"\r\n")

    async def relay(self, head: bytes, exchange: Exchange, idle: Callable[[], Limit], transform: Transform) -> None:
        """Write a stream to the socket as it comes from the engine's, to its end."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        done = asyncio.get_running_loop().create_future()
        splice = _Splice(cycle, transform, done, chunked=self._chunked)
        splice.begin(self._begun, head)
        self._exchange = exchange
        if cycle.flow.write_paused:
            exchange.pause()
        try:
            exchange.pipe(splice, idle)
            await done
        except asyncio.CancelledError:
            if not cycle.disconnected:
                splice.end(EngineFailedError(STOPPED))
            raise
        finally:
            self._exchange = None

    # What the protocol asks and tells.

    @property
    def answered(self) -> bool:
        """Tell whether the response has begun."""
        return self._cycle.response_started

    def part(self) -> None:
        """Let go of the scope, in which this client stands: what refers to itself only a slow collection would free."""
        if self._scope is not None:
            self._scope.pop("extensions", None)

    def wake(self) -> None:
        """Hear that the body is complete, or too long."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def left(self) -> None:
        """Hear that the connection is closed."""
        if not self._cycle.response_complete:
            self.gone = True
            self._cycle.disconnected = True
            self._cycle.message_event.set()
            self.wake()
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

    __slots__ = ("_chunked", "_cycle", "_done", "_pass", "_takes", "_transform", "_write")

    def __init__(
        self, cycle: RequestResponseCycle | Turn, transform: Transform, done: asyncio.Future[None], *, chunked: bool
    ) -> None:
        self._cycle = cycle
        self._transform = transform
        self._pass = transform.feed
        self._takes = transform.takes
        self._done = done
        self._write = cycle.transport.write
        self._chunked = chunked

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

    def chunk(self, data: bytes, start: int) -> bool:
        """Write one chunk as it is, where that is possible."""
        if self._chunked and not self._cycle.disconnected and self._takes(data, start):
            self._write(data)
            return True
        return False

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


def _head(cycle: RequestResponseCycle | Turn, status: int, headers: Mapping[str, str], framing: bytes) -> bytes:
    """Return the head of a response as uvicorn's own `send` would write it."""
    cycle.response_started = True
    cycle.waiting_for_100_continue = False
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1")
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise ValueError("a header value holds a line break")
    default = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
    close = b"" if cycle.keep_alive else b"connection: close\r\n"
    return STATUS_LINE[status] + default + lines + close + framing


def _complete(cycle: RequestResponseCycle | Turn) -> None:
    """End a response as uvicorn's own `send` does."""
    cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
