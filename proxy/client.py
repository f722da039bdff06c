"""The client's side of a request: its headers and body, whether it is still there, and a stream passed on to it.

`AsgiClient` works under any ASGI server. Under ours (`client_protocol`) a request carries a `LinkedClient` in its
scope, which watches the socket without a task and writes to it without a `send` a chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

from proxy.errors import BodyTooLargeError, EngineFailedError
from proxy.exchange import Exchange, Limit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

EXTENSION = "pdcluster.client"
_MIB = 1 << 20
_DIGITS = 20  # of a number of 64 bits; a parser lets no larger one through


class ClientGoneError(Exception):
    """The client left before its body was there."""


class Transform(Protocol):
    """What becomes of a stream on its way: `relay.Relay`."""

    def feed(self, data: bytes) -> bytes:
        """Return what the client gets of the next bytes."""
        ...

    def takes(self, data: bytes, start: int) -> bool:
        """Tell whether a chunk may go out as it came, and take note of it then. See `exchange.Sink.chunk`."""
        ...

    def end(self, error: EngineFailedError | None) -> bytes:
        """Return the last bytes."""
        ...


class Client(Protocol):
    """Who asked. `gone` turns true when the connection is closed before the answer is complete."""

    gone: bool

    async def body(self, limit: int, declared: int) -> bytes:
        """Return the whole body, whose length is declared or 0; raises `BodyTooLargeError`, `ClientGoneError`."""
        ...

    def when_gone(self, callback: Callable[[], object] | None) -> None:
        """Have a callback called when the client leaves; at once where it has left."""
        ...

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a response whose body is all there; its length is added to the headers."""
        ...

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a response whose body is a stream."""
        ...

    async def relay(self, head: bytes, exchange: Exchange, idle: Callable[[], Limit], transform: Transform) -> None:
        """Pass a stream on to its end; the response has been started."""
        ...


class AsgiClient:
    """A client behind any ASGI server: a task waits for its disconnect, each chunk is a `send`."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.send = send
        self.gone = False
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._callback: Callable[[], object] | None = None

    async def body(self, limit: int, declared: int) -> bytes:
        """Return the whole body; one that says that it is too long is refused before it is read."""
        refuse_longer(declared, limit)
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            refuse_longer(size, limit)
            if not message.get("more_body", False):
                return b"".join(parts)

    def when_gone(self, callback: Callable[[], object] | None) -> None:
        """Watch for the disconnect from here on; None ends that."""
        self._callback = callback
        if callback is None and self._watcher is not None:
            self._watcher.cancel()
        elif callback is not None and self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole response."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.send({"type": "http.response.body", "body": body})

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def relay(self, head: bytes, exchange: Exchange, idle: Callable[[], Limit], transform: Transform) -> None:
        """Send chunk by chunk; a client that reads slowly makes the engine wait, since nothing is taken meanwhile."""
        error = None
        data = head
        try:
            while data:
                passed = transform.feed(data)
                if passed:
                    await self.send({"type": "http.response.body", "body": passed, "more_body": True})
                data = await exchange.take(idle())
        except EngineFailedError as caught:
            error = caught
        await self.send({"type": "http.response.body", "body": transform.end(error)})

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._callback is not None:
            self._callback()


class _WrappedClient(AsgiClient):
    """A client under our server behind a middleware that wants to see what is sent."""

    def __init__(self, linked: Client, receive: Receive, send: Send) -> None:
        super().__init__(receive, send)
        self._linked = linked

    async def body(self, limit: int, declared: int) -> bytes:
        """Return the whole body."""
        return await self._linked.body(limit, declared)

    def when_gone(self, callback: Callable[[], object] | None) -> None:
        """Have a callback called when the client leaves."""
        self._callback = callback
        self._linked.when_gone(None if callback is None else self._left)

    def _left(self) -> None:
        self.gone = True
        if self._callback is not None:
            self._callback()


def client_of(scope: Scope, receive: Receive, send: Send) -> Client:
    """Return the client of a request."""
    linked = scope.get("extensions", {}).get(EXTENSION)
    if linked is None:
        return AsgiClient(receive, send)
    client: Client = linked
    return client if linked.send == send else _WrappedClient(client, receive, send)


def header_map(scope: Scope) -> Mapping[bytes, bytes]:
    """Return a request's headers, names in lower case; of a name that occurs twice the last value."""
    return dict(scope["headers"])


def declared_length(headers: Mapping[bytes, bytes]) -> int:
    """Return what `content-length` says, 0 where it says nothing."""
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) <= _DIGITS else 0


def refuse_longer(size: int, limit: int) -> None:
    """Raise `BodyTooLargeError` for a body of more than `limit` bytes."""
    if size > limit:
        raise BodyTooLargeError(f"the body is over {limit // _MIB} MiB (--max-body-mb)")
