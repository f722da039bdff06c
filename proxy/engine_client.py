"""HTTP to engines: a keep-alive pool for each endpoint. The only module that opens connections.

Connections are not limited in number: the proxy's own admission bounds them. Every failure becomes an
`EngineFailedError` (or `EngineTimeoutError`) whose message names the leg and the endpoint.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from proxy.config import Timeouts
from proxy.endpoints import Endpoint
from proxy.engine_connection import EngineConnection
from proxy.errors import EngineFailedError
from proxy.exchange import Exchange, Limit

# Shorter than the 5 s after which vLLM's server closes idle connections, so that none is used while it goes.
_KEEPALIVE_S = 4.0
# What this process or host has run out of, which says nothing of an engine.
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


class EngineReply(NamedTuple):
    """A whole answer; header names are lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class EngineRequest(NamedTuple):
    """What an engine is asked.

    One that is `replayable` is sent once more where a reused connection turns out to have been closed: an engine may
    have got it twice then, which a handoff must never be. `on_sent` hears of the exchange as soon as the engine may
    know of the request; `on_left` gets it, to close it, where nobody waits for the answer any more. `headers` are lines
    that end with CRLF, as `firewall.headers_for_engine` writes them.
    """

    path: str
    body: bytes | memoryview
    headers: bytes
    method: str = "POST"
    replayable: bool = False
    on_sent: Callable[[Exchange], None] | None = None
    on_left: Callable[[Exchange], None] | None = None
    tail: bytes = b""  # what follows `body`, which may be too long to copy for it


class _Pool:
    """The connections to one engine: idle ones by age, and all of them, to be closed at the end."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if tls else 80)
        self.prefix = parts.path.rstrip("/")
        self.authority = parts.netloc.rpartition("@")[2]
        self.ssl = ssl.create_default_context() if tls else None
        self.first_lines: dict[tuple[str, str], bytes] = {}  # request line and host, by method and path
        self.idle: dict[EngineConnection, None] = {}
        self.open: set[EngineConnection] = set()

    def reuse(self) -> EngineConnection | None:
        """Return the connection that was used last, None where all are too old."""
        while self.idle:
            connection, _ = self.idle.popitem()
            if connection.usable:
                if time.monotonic() - connection.freed_at < _KEEPALIVE_S:
                    return connection
                connection.drop()
        return None

    async def connect(self) -> EngineConnection:
        """Open a connection."""
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: EngineConnection(self._free, self._lost),
            self.host,
            self.port,
            ssl=self.ssl,
            server_hostname=self.host if self.ssl is not None else None,
        )
        self.open.add(connection)
        return connection

    def close(self) -> None:
        """Cut all connections."""
        for connection in list(self.open):
            connection.drop()

    def _free(self, connection: EngineConnection) -> None:
        connection.freed_at = time.monotonic()
        self.idle[connection] = None
        if len(self.idle) > 1:
            self._drop_old(connection.freed_at - _KEEPALIVE_S)

    def _drop_old(self, oldest: float) -> None:
        """Close what has been idle since before then, oldest first."""
        while self.idle:
            connection = next(iter(self.idle))
            if connection.freed_at > oldest:
                return
            del self.idle[connection]
            connection.drop()

    def _lost(self, connection: EngineConnection) -> None:
        self.idle.pop(connection, None)
        self.open.discard(connection)


class EngineClient:
    """Calls engines; closed by whoever made it."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._connect_limit = timeouts.connect
        self._pools: dict[str, _Pool] = {}

    async def open(
        self, endpoint: Endpoint, request: EngineRequest, *, leg: str, limit: Limit, whole: bool = False
    ) -> Exchange:
        """Send a request and wait for status and headers, or for the whole answer; the caller closes the exchange."""
        pool = self._pools.get(endpoint.url)
        if pool is None:
            pool = self._pools[endpoint.url] = _Pool(endpoint.url)
        head = _head(request, pool)
        connection = pool.reuse()
        while True:
            fresh = connection is None
            if connection is None:
                connection = await self._connect(pool, f"{leg}: {endpoint.name}")
            exchange = connection.send(head, request.body, request.tail, leg, endpoint.name, whole)
            if request.on_sent is not None:
                request.on_sent(exchange)
            try:
                await exchange.opened(limit)
            except EngineFailedError:
                exchange.close()
                if fresh or not request.replayable or not exchange.untouched:
                    raise
                connection = None
            except BaseException:
                _leave(exchange, request)
                raise
            else:
                return exchange

    async def call(self, endpoint: Endpoint, request: EngineRequest, *, leg: str, limit: Limit) -> EngineReply:
        """Send a request and read the whole answer within the limit."""
        exchange = await self.open(endpoint, request, leg=leg, limit=limit, whole=True)
        return EngineReply(exchange.status, exchange.headers, exchange.arrived())

    async def get(self, endpoint: Endpoint, path: str, limit: float, headers: bytes) -> EngineReply:
        """GET within `limit` seconds."""
        request = EngineRequest(path, b"", headers, method="GET", replayable=True)
        return await self.call(endpoint, request, leg=path, limit=Limit(limit))

    def connections(self) -> int:
        """Return how many connections are open."""
        return sum(len(pool.open) for pool in self._pools.values())

    def close(self) -> None:
        """Cut all connections."""
        for pool in self._pools.values():
            pool.close()

    async def _connect(self, pool: _Pool, who: str) -> EngineConnection:
        try:
            async with asyncio.timeout(self._connect_limit):
                return await pool.connect()
        except (OSError, TimeoutError) as error:  # ssl's errors are OSErrors too
            if error.errno in _OURS:
                raise EngineFailedError(f"{who} cannot be reached: {error.strerror}", counts=False) from error
            raise EngineFailedError(f"{who} refuses connections", refused=True) from error


def _leave(exchange: Exchange, request: EngineRequest) -> None:
    if request.on_left is None:
        exchange.close()
    else:
        request.on_left(exchange)


def _head(request: EngineRequest, pool: _Pool) -> bytes:
    """Return the request line and headers."""
    first = pool.first_lines.get((request.method, request.path))
    if first is None:
        line = f"{request.method} {pool.prefix}{request.path} HTTP/1.1\r\nhost: {pool.authority}\r\n"
        first = pool.first_lines[request.method, request.path] = line.encode("latin-1")
    if request.method == "GET":
        return b"%b%b\r\n" % (first, request.headers)
    return b"%b%bcontent-length: %d\r\n\r\n" % (first, request.headers, len(request.body) + len(request.tail))
