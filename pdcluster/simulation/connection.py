"""HTTP/1.1 of simulated engines: one request at a time on a connection, answered whole or in chunks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
import orjson

_REASONS = {200: b"OK", 400: b"Bad Request", 403: b"Forbidden", 404: b"Not Found", 500: b"Internal Server Error"}
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(slots=True)
class Asked:
    """One request: names of headers are in lower case."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    keep_alive: bool = True


class Reply:
    """Where one request is answered: `send` once, or `start`, `event` and `end`.

    `on_gone` is called if the client leaves before the end; after that everything that is written goes nowhere.
    """

    def __init__(self, transport: asyncio.Transport, over: Callable[[], None]) -> None:
        self._transport = transport
        self._over = over
        self.on_gone: Callable[[], None] | None = None

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None, kind: str = "") -> None:
        """Answer whole; `content` is bytes of a `kind`, or anything that becomes JSON."""
        body = content if isinstance(content, bytes) else orjson.dumps(content)
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n%b"
            % (status, _REASONS[status], (kind or "application/json").encode(), more.encode(), len(body), body)
        )
        self._end()

    def start(self) -> None:
        """Begin a stream of events."""
        self._transport.write(_STREAM)

    def event(self, data: bytes) -> None:
        """Send one event."""
        self._transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def end(self) -> None:
        """End a stream, with [DONE]."""
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self._end()

    def _end(self) -> None:
        self.on_gone = None
        self._over()


class Connection(asyncio.Protocol):
    """One client's connection; `handle` is called with each request when the one before it has been answered."""

    def __init__(self, handle: Callable[[Asked, Reply], None], connections: set[Connection]) -> None:
        self._handle = handle
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._asked = Asked()
        self._url = bytearray()
        self._queue: deque[Asked] = deque()
        self._reply: Reply | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment] # TCP has this kind
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Tell whoever answers that nobody listens."""
        self._connections.discard(self)
        reply, self._reply, self._transport = self._reply, None, None
        if reply is not None and reply.on_gone is not None:
            reply.on_gone()

    def data_received(self, data: bytes) -> None:
        """Parse."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # httptools calls these.

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._asked, self._url = Asked(), bytearray()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._asked.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Let a client send its body that asks whether it may."""
        if self._asked.headers.get("expect", "").lower() == "100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._asked.body += body

    def on_message_complete(self) -> None:
        """Hand the request over, or let it wait for the one before it."""
        self._asked.method = self._parser.get_method().decode()
        self._asked.keep_alive = self._parser.should_keep_alive()
        self._asked.path = self._url.decode("latin-1").partition("?")[0]
        self._queue.append(self._asked)
        self._next()

    def _next(self) -> None:
        if self._reply is None and self._queue and self._transport is not None:
            asked = self._queue.popleft()
            self._reply = Reply(self._transport, lambda: self._answered(asked.keep_alive))
            self._handle(asked, self._reply)

    def _answered(self, keep_alive: bool) -> None:
        self._reply = None
        if not keep_alive and self._transport is not None:
            self._transport.close()
        elif self._queue:
            asyncio.get_running_loop().call_soon(self._next)
