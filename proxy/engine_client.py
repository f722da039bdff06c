"""HTTP to engines. The only module that knows the HTTP library; foreign errors are translated here.

Connections are kept alive and not limited in number: the proxy's own admission bounds them. Every failure becomes an
`EngineFailedError` (or `EngineTimeoutError`) whose message names the leg and the endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx

from proxy.config import Timeouts
from proxy.endpoints import Endpoint
from proxy.errors import EngineFailedError, EngineTimeoutError


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A whole answer; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class EngineStream:
    """An answer whose body is still coming, in the pieces in which it arrives."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


class EngineClient:
    """Calls engines; `client` is closed by whoever made it."""

    def __init__(self, client: httpx.AsyncClient, timeouts: Timeouts) -> None:
        self._client = client
        self._timeouts = timeouts

    async def call(
        self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str], *, leg: str, limit: float | None
    ) -> EngineReply:
        """POST and read the whole answer within `limit` seconds."""
        with _translated(endpoint, leg, limit):
            async with asyncio.timeout(limit):
                reply = await self._client.post(endpoint.url + path, content=body, headers=dict(headers))
        return EngineReply(reply.status_code, reply.headers, reply.content)

    async def get(self, endpoint: Endpoint, path: str, limit: float, headers: Mapping[str, str]) -> EngineReply:
        """GET within `limit` seconds."""
        with _translated(endpoint, path, limit):
            async with asyncio.timeout(limit):
                reply = await self._client.get(endpoint.url + path, headers=dict(headers))
        return EngineReply(reply.status_code, reply.headers, reply.content)

    @asynccontextmanager
    async def stream(
        self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str], *, leg: str
    ) -> AsyncIterator[EngineStream]:
        """POST and give status and headers as soon as they are there; the connection closes with the block."""
        request = self._client.build_request("POST", endpoint.url + path, content=body, headers=dict(headers))
        with _translated(endpoint, leg, self._timeouts.headers):
            async with asyncio.timeout(self._timeouts.headers):
                reply = await self._client.send(request, stream=True)
        try:
            yield EngineStream(reply.status_code, reply.headers, self._chunks(endpoint, reply, leg))
        finally:
            await reply.aclose()

    async def _chunks(self, endpoint: Endpoint, reply: httpx.Response, leg: str) -> AsyncIterator[bytes]:
        iterator = aiter(reply.aiter_raw())
        while True:
            with _translated(endpoint, leg, self._timeouts.idle):
                try:
                    async with asyncio.timeout(self._timeouts.idle):
                        chunk = await anext(iterator)
                except StopAsyncIteration:
                    return
            yield chunk


def make_http_client(timeouts: Timeouts) -> httpx.AsyncClient:
    """Return a client fit for thousands of streams: no limit on connections, no proxy from the environment."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=timeouts.connect),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0),
        trust_env=False,
    )


@contextmanager
def _translated(endpoint: Endpoint, leg: str, limit: float | None) -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise EngineFailedError(f"{leg}: {endpoint.name} refuses connections", refused=True) from error
    except TimeoutError as error:
        raise EngineTimeoutError(f"{leg}: {endpoint.name} gave nothing for {limit:g} s") from error
    except httpx.HTTPError as error:
        raise EngineFailedError(f"{leg}: {endpoint.name} broke off: {type(error).__name__}") from error
