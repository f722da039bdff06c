"""One HTTP/1.1 connection to an engine: an asyncio protocol around httptools' parser, one exchange at a time."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable

import httptools

from proxy.errors import EngineFailedError
from proxy.exchange import Exchange

# Bytes of a body up to which one write of a copy is cheaper than a vectored one.
_WORTH_A_COPY = 1 << 16
_FIRST_FINAL_STATUS, _LAST_STATUS = 200, 599
_WITHOUT_BODY = (204, 304)
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_LONGEST_CHUNK = 4096
# Engines make an event in every step of some milliseconds. What comes faster than the first was held up somewhere, or
# comes from a tiny model: what follows is gathered for the second (seconds), and others go first, who wait for their
# first token. An answer's last events come together and never wait: only what vLLM marks as unfinished does.
FAST_S, HOLD_S = 0.002, 0.016
_UNFINISHED = b'"finish_reason":null'


# What nothing of less than that length begins with.
_NO_SIZE_LINE = b"-" * _LONGEST_CHUNK


def _size_line(length: int) -> bytes:
    """Return the size line that a chunk of so many bytes has, framing included; where there is none, what fits nothing.

    The last chunk of all, which is empty, is not among them.
    """
    for digits in range(1, 5):
        size = length - digits - 4
        if size > 0 and len(b"%x" % size) == digits:
            return b"%x\r\n" % size
    return _NO_SIZE_LINE


_SIZE_LINES = [_size_line(length) for length in range(_LONGEST_CHUNK)]


class EngineConnection(asyncio.Protocol):
    """Speaks HTTP/1.1. `on_free` hears when it may be used again, `on_lost` when it is gone."""

    def __init__(
        self,
        on_free: Callable[[EngineConnection], None],
        on_lost: Callable[[EngineConnection], None],
    ) -> None:
        self._held = False
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._body: list[bytes] = []
        self._raw_headers: dict[bytes, bytes] = {}
        self.on_body = self._body.append
        self.on_header = self._raw_headers.__setitem__
        # Whether the parser stands between two chunks: at every beginning and end of one the two change places.
        self._gap = [True, False]
        self.on_chunk_header = self.on_chunk_complete = self._gap.reverse
        self._take: Callable[[bytes, int], bool] | None = None
        self._between = False
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._until_close = self._chunked = False
        self._inflater: zlib._Decompress | None = None
        self._end = 0
        self._keep = False
        self._spoilt = False
        self._reused = False
        self._answered = False
        self._expires: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.freed_at = 0.0

    @property
    def usable(self) -> bool:
        """Tell whether another exchange may begin."""
        return self._exchange is None and self._transport is not None and not self._transport.is_closing()

    def send(
        self, head: bytes, body: bytes | memoryview, tail: bytes, leg: str, endpoint: str, whole: bool = False
    ) -> Exchange:
        """Begin an exchange; leg and endpoint are for errors, `whole` says that nobody looks before it is complete."""
        if self._transport is None or self._exchange is not None:
            raise RuntimeError("the connection is in use")
        self._exchange = exchange = Exchange(self, leg, endpoint, whole)
        self._answered = False
        self._end = 0
        if len(body) < _WORTH_A_COPY:
            self._transport.write(b"".join((head, body, tail)))
        else:
            self._transport.writelines((head, body, tail) if tail else (head, body))
        return exchange

    def pass_chunks(self, take: Callable[[bytes, int], bool]) -> None:
        """Offer chunks that come alone to this, without the parser, which need not see what is taken."""
        if self._chunked and self._inflater is None and self._exchange is not None:
            self._take = take

    def wait_until(self, moment: float | None) -> None:
        """Have the exchange expire at a moment, or no more. One timer stays armed for many waits: most never expire."""
        self._expires = moment
        if moment is not None and (self._timer is None or self._timer_at > moment):
            if self._timer is not None:
                self._timer.cancel()
            self._arm(moment)

    def _arm(self, moment: float) -> None:
        self._timer_at = moment
        self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - time.monotonic()), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._exchange is None or self._expires is None:
            return
        if time.monotonic() >= self._expires:
            self._exchange.expire()
        else:
            self._arm(self._expires)

    def drop(self) -> None:
        """Cut the connection."""
        self._exchange = self._take = None
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        """Read nothing more from the socket for now."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again; where the connection is held, once it is let go."""
        if not self._held and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _hold(self) -> None:
        """Read nothing more for a moment."""
        self._held = True
        self.pause_reading()
        asyncio.get_running_loop().call_later(HOLD_S, self._go_on)

    def _go_on(self) -> None:
        """Read again, unless a slow client keeps the exchange waiting; what comes at once was held up."""
        self._held = False
        if self._exchange is not None:
            self._exchange.last = time.monotonic()
        if self._exchange is None or not self._exchange.paused:
            self.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse; whatever comes without a request, or after its answer, makes the connection unfit for another."""
        exchange = self._exchange
        if self._between and self._take is not None and exchange is not None and len(data) < _LONGEST_CHUNK:
            size_line = _SIZE_LINES[len(data)]
            if data.startswith(size_line) and self._take(data, len(size_line)):
                self._stamp(exchange, time.monotonic(), data)
                return
        if exchange is None:
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # the latter is no kind of the former
            self._keep = False
            self._spoilt = True
            if not exchange.complete:
                exchange.fail(EngineFailedError(f"{exchange.who} broke off: what it sent is not HTTP"))
        self._between = self._gap[0] and data.endswith(b"\r\n")
        body = self._body
        if body:
            if exchange.complete:
                del body[self._end :]  # what came after the answer
            piece = body[0] if len(body) == 1 else b"".join(body)
            body.clear()
            if self._inflater is not None:
                piece = self._inflated(piece, exchange)
            if piece and exchange.error is None:
                exchange.put(piece)
                if exchange.piped and not exchange.complete:
                    self._stamp(exchange, time.monotonic(), piece)
        if exchange.complete:
            self._finish(exchange)
        elif self._spoilt:
            self.drop()

    def _stamp(self, exchange: Exchange, now: float, data: bytes) -> None:
        """Note when a piped stream's bytes came; what comes too fast is gathered."""
        if now - exchange.last < FAST_S and not self._held:
            last_event = max(0, data.rfind(b"\ndata:"))
            if data.find(_UNFINISHED, last_event) >= 0:
                self._hold()
        exchange.last = now

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what was under way, unless the end of the connection is what ends the answer."""
        if self._timer is not None:
            self._timer.cancel()
        del self._parser  # it refers to us
        self._take = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.complete:
            if self._until_close and exc is None and exchange.error is None:
                exchange.complete = True
                exchange.finish()
            else:
                exchange.untouched = self._reused and not self._answered
                why = "the connection closed" if exc is None else type(exc).__name__
                exchange.fail(EngineFailedError(f"{exchange.who} broke off: {why}"))
        self._on_lost(self)

    # httptools; callbacks for bodies, headers and chunks are methods of a list and a dict: no calls of ours.

    def on_message_begin(self) -> None:
        """Forget the answer before; a second one to the same request is none that anybody asked for."""
        if self._exchange is not None and self._exchange.complete:
            self._spoilt = True
        self._answered = True
        self._raw_headers.clear()
        self._until_close = False
        self._inflater = None

    def on_headers_complete(self) -> None:
        """Tell the exchange its status; interim answers (1xx) have none."""
        status = self._parser.get_status_code()
        exchange = self._exchange
        if status < _FIRST_FINAL_STATUS or exchange is None or exchange.complete:
            return
        if status > _LAST_STATUS:
            exchange.fail(EngineFailedError(f"{exchange.who} broke off: {status} is no status"))
            self._spoilt = True
            return
        headers = {name.lower(): value for name, value in self._raw_headers.items()}
        coding = headers.get(b"content-encoding", b"identity")
        if coding in (b"gzip", b"deflate"):
            self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
        elif coding != b"identity":
            exchange.fail(EngineFailedError(f"{exchange.who} broke off: it sent an encoding that nobody asked for"))
            self._spoilt = True
            return
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        framed = self._chunked or b"content-length" in headers
        self._until_close = not framed and status not in _WITHOUT_BODY
        exchange.answered(status, headers)

    def on_message_complete(self) -> None:
        """Note the end of an answer, and where in this read it was."""
        exchange = self._exchange
        if exchange is not None and exchange.status and exchange.error is None and not exchange.complete:
            exchange.complete = True
            self._end = len(self._body)
            self._keep = self._parser.should_keep_alive()  # it forgets at once

    def _inflated(self, data: bytes, exchange: Exchange) -> bytes:
        if self._inflater is None:
            return data
        try:
            return self._inflater.decompress(data)
        except zlib.error:
            exchange.complete = False
            self._spoilt = True
            exchange.fail(EngineFailedError(f"{exchange.who} broke off: what it sent cannot be decompressed"))
            return b""

    def _finish(self, exchange: Exchange) -> None:
        """Give the connection back, then tell the exchange."""
        self._exchange = self._take = None
        self._expires = None
        if exchange.paused:
            exchange.paused = False
            self.resume_reading()
        if self._keep and not self._spoilt and self._transport is not None and not self._transport.is_closing():
            self._reused = True
            self._on_free(self)
        else:
            self.drop()
        exchange.finish()
