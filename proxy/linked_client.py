"""A client under our own server: streams go to its socket straight from an engine's, without a `send` a chunk.

What it writes is what uvicorn's own `send` would; see `client.Client` for what each method promises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from proxy.client import ClientGoneError, Send, Transform, refuse_longer
from proxy.errors import EngineFailedError
from proxy.exchange import Exchange, Limit

_WITHOUT_CHUNKS = "1.0"


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
