"""One HTTP/1.1 connection to an engine: an asyncio protocol around httptools' parser, one exchange at a time.

An exchange is first pulled (`opened`, `take`, `whole`) and may then be piped: from there on each piece goes from the
socket's callback straight into a sink, without a task in between.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import httptools

from proxy.errors import EngineFailedError, EngineTimeoutError

# Bytes that a pulled stream may hold before its engine is made to wait.
_HIGH_WATER = 1 << 18
_FIRST_FINAL_STATUS = 200
_WITHOUT_BODY = (204, 304)
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class Limit:
    """How long to wait for an engine, None for ever; `total` is the whole request's limit where that comes first."""

    seconds: float | None
    total: float | None = None

    def __str__(self) -> str:
        if self.total is not None:
            return f"was not done within the request's {self.total:g} s"
        return f"gave nothing for {self.seconds:g} s"


class Sink(Protocol):
    """Takes a piped stream; both are called from the socket's callback and must neither block nor raise."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        ...

    def end(self, error: EngineFailedError | None) -> None:
        """Hear that nothing more comes, and why if that is too early; called once."""
        ...


class Exchange:
    """A request and its answer. `who` names leg and endpoint in errors; `status` is 0 until the headers are there.

    `untouched` is true where a connection that was reused broke before any byte of an answer: the engine had closed it
    as idle, and what can be asked twice may be asked again.
    """

    __slots__ = (
        "_connection",
        "_held",
        "_idle",
        "_last",
        "_pieces",
        "_sink",
        "_timer",
        "_waiter",
        "_whole",
        "complete",
        "error",
        "headers",
        "paused",
        "status",
        "untouched",
        "who",
    )

    def __init__(self, connection: EngineConnection, who: str) -> None:
        self.who = who
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.untouched = False
        self.paused = False
        self.error: EngineFailedError | None = None
        self._connection = connection
        self._pieces: list[bytes] = []
        self._held = 0
        self._whole = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._last = 0.0
        self._idle: Callable[[], Limit] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def opened(self, limit: Limit) -> None:
        """Wait for status and headers; raises `EngineFailedError`."""
        while not self.status:
            await self._wait(limit, limit.seconds)

    async def take(self, limit: Limit) -> bytes:
        """Return the next bytes of the body, none at its end; raises `EngineFailedError`."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait(limit, limit.seconds)
        data = self._joined()
        self.resume()
        return data

    async def whole(self, limit: Limit, since: float) -> bytes:
        """Return all of the body that is still to come, within a limit that counts from `since` (monotonic seconds)."""
        self._whole = True
        self.resume()
        while not self.complete:
            left = None if limit.seconds is None else max(0.0, since + limit.seconds - time.monotonic())
            await self._wait(limit, left)
        return self._joined()

    def arrived(self) -> bytes | None:
        """Return the body if all of it is there and nobody has taken it, without waiting."""
        return self._joined() if self.complete else None

    def pipe(self, sink: Sink, idle: Callable[[], Limit]) -> None:
        """Give everything from here on to a sink. `idle` tells how long it may be silent from now on."""
        self._sink = sink
        self._idle = idle
        self._last = time.monotonic()
        if self._pieces:
            sink.feed(self._joined())
        if self.complete or self.error is not None:
            self._end_pipe(self.error)
            return
        self.resume()
        self._watch()

    def pause(self) -> None:
        """Make the engine wait: the sink is full."""
        if not self.paused and not self.complete:
            self.paused = True
            self._connection.pause_reading()

    def resume(self) -> None:
        """Let the engine go on."""
        if self.paused:
            self.paused = False
            self._last = time.monotonic()
            self._connection.resume_reading()

    def close(self) -> None:
        """End the exchange; unless it is complete the connection is cut, which makes the engine stop its work."""
        self._sink = None
        self._cancel_timer()
        if not self.complete:
            self._connection.drop()

    # What the connection tells.

    def put(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(data)

    def advance(self) -> None:
        """Act on what one read of the socket brought."""
        sink = self._sink
        if sink is not None:
            if self._pieces:
                self._last = time.monotonic()
                sink.feed(self._joined())
            if self.complete:
                self._end_pipe(None)
            return
        self._wake()
        if not self._whole and self._pieces and not self.complete:
            self._held = sum(map(len, self._pieces))
            if self._held > _HIGH_WATER:
                self.pause()

    def fail(self, error: EngineFailedError) -> None:
        """Note that nothing more will come."""
        if self.complete or self.error is not None:
            return
        self.error = error
        sink = self._sink
        if sink is None:
            self._wake()
            return
        if self._pieces:
            sink.feed(self._joined())
        self._end_pipe(error)

    def _joined(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        return data

    def _end_pipe(self, error: EngineFailedError | None) -> None:
        sink, self._sink = self._sink, None
        self._cancel_timer()
        if sink is not None:
            sink.end(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, limit: Limit, left: float | None) -> None:
        """Wait for something new; `left` is what is left of the limit."""
        if self.error is not None:
            raise self.error
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if left is None else loop.call_later(left, _expire, waiter)
        try:
            await waiter
        except TimeoutError:
            self.fail(self._late(limit))
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        self._raise_unless_pieces()

    def _raise_unless_pieces(self) -> None:
        if self.error is not None and not self._pieces:
            raise self.error

    def _late(self, limit: Limit) -> EngineTimeoutError:
        return EngineTimeoutError(f"{self.who} {limit}", counts=limit.total is None)

    def _watch(self) -> None:
        """Fail a piped stream that was silent for too long, else look again when it could be; no timer a piece."""
        if self._sink is None or self._idle is None:
            return
        limit = self._idle()
        now = time.monotonic()
        if limit.seconds is None:
            return
        since = now if self.paused or limit.total is not None else self._last
        due = since + limit.seconds
        if due <= now:
            self.fail(self._late(limit))
            self._connection.drop()
        else:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._watch)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


class EngineConnection(asyncio.Protocol):
    """Speaks HTTP/1.1. `on_free` hears when it may be used again, `on_lost` when it is gone."""

    def __init__(
        self, on_free: Callable[[EngineConnection], None], on_lost: Callable[[EngineConnection], None]
    ) -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._headers: dict[str, str] = {}
        self._until_close = False
        self._inflater: zlib._Decompress | None = None
        self._keep = False
        self._reused = False
        self._answered = False
        self.freed_at = 0.0

    @property
    def usable(self) -> bool:
        """Tell whether another exchange may begin."""
        return self._exchange is None and self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, who: str) -> Exchange:
        """Begin an exchange."""
        if self._transport is None or self._exchange is not None:
            raise RuntimeError("the connection is in use")
        self._exchange = exchange = Exchange(self, who)
        self._answered = False
        self._transport.writelines((head, body))
        return exchange

    def drop(self) -> None:
        """Cut the connection."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        """Read nothing more from the socket for now."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse; whatever comes without a request, or after its answer, makes the connection unfit for another."""
        exchange = self._exchange
        if exchange is None:
            self.drop()
            return
        self._answered = True
        fit = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            fit = False
            if not exchange.complete:
                exchange.fail(EngineFailedError(f"{exchange.who} broke off: what it sent is not HTTP"))
        if not exchange.complete:
            exchange.advance()
            if not fit:
                self.drop()
            return
        self._finish(exchange, fit=fit and self._keep)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what was under way, unless the end of the connection is what ends the answer."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.complete:
            if self._until_close and exc is None:
                exchange.complete = True
                exchange.advance()
            else:
                exchange.untouched = self._reused and not self._answered
                why = "the connection closed" if exc is None else type(exc).__name__
                exchange.fail(EngineFailedError(f"{exchange.who} broke off: {why}"))
        self._on_lost(self)

    # httptools

    def on_message_begin(self) -> None:
        """Forget the answer before."""
        self._headers = {}
        self._until_close = False
        self._inflater = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers come too late to matter."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Tell the exchange its status."""
        status = self._parser.get_status_code()
        exchange = self._exchange
        if status < _FIRST_FINAL_STATUS or exchange is None or exchange.complete:
            return
        headers = self._headers
        if headers.get("content-encoding") in ("gzip", "deflate"):
            self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
        framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "")
        self._until_close = not framed and status not in _WITHOUT_BODY
        exchange.headers = headers
        exchange.status = status

    def on_body(self, data: bytes) -> None:
        """Hand a piece on."""
        exchange = self._exchange
        if exchange is None or exchange.complete:
            return
        if self._inflater is not None:
            try:
                data = self._inflater.decompress(data)
            except zlib.error:
                exchange.fail(EngineFailedError(f"{exchange.who} broke off: what it sent cannot be decompressed"))
                return
        if data:
            exchange.put(data)

    def on_message_complete(self) -> None:
        """Note the end; interim answers (1xx) are none."""
        exchange = self._exchange
        self._keep = self._parser.should_keep_alive()  # it forgets at once
        if exchange is not None and exchange.status and exchange.error is None:
            exchange.complete = True

    def _finish(self, exchange: Exchange, *, fit: bool) -> None:
        """Give the connection back before the exchange is told, so that whoever it wakes finds it free."""
        self._exchange = None
        if exchange.paused:
            exchange.paused = False
            self.resume_reading()
        if fit and self._transport is not None and not self._transport.is_closing():
            self._reused = True
            self._on_free(self)
        else:
            self.drop()
        exchange.advance()
