"""A bare relay of bytes, the floor under every router: it parses nothing and talks to one decode stand-in.

usage: python -m pdcluster.bench.tcp_relay PORT TO_PORT
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

_BACKLOG = 4096


class _End(asyncio.Protocol):
    """One end of a relayed connection; what comes before the other end is there waits for it."""

    def __init__(self, other: _End | None = None) -> None:
        self._other = other
        self._waiting: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        for data in self._waiting:
            self.write(data)
        self._waiting.clear()

    def join(self, other: _End) -> None:
        self._other = other

    def write(self, data: bytes) -> None:
        if self._transport is None:
            self._waiting.append(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._other is not None:
            self._other.close()


async def serve(port: int, to_port: int) -> None:
    """Relay for ever."""
    loop = asyncio.get_running_loop()
    dialling: set[asyncio.Task[object]] = set()

    def accept() -> _End:
        client = _End()
        engine = _End(client)
        client.join(engine)
        task: asyncio.Task[object] = loop.create_task(loop.create_connection(lambda: engine, "127.0.0.1", to_port))
        dialling.add(task)
        task.add_done_callback(dialling.discard)
        return client

    await loop.create_server(accept, "127.0.0.1", port, backlog=_BACKLOG)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
