"""HTTP to engines. The only module that knows the HTTP library; foreign errors are translated here.

Connections are kept alive and not limited in number: the proxy's own admission bounds them. Every failure becomes an
`EngineFailedError` (or `EngineTimeoutError`) whose message names the leg and the endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx

from proxy.config import Timeouts
from proxy.endpoints import Endpoint
from proxy.errors import EngineFailedError, EngineTimeoutError

# Shorter than the 5 s after which vLLM's server closes idle connections, so that none is used while it goes.
_KEEPALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class Limit:
    """How long to wait for an engine, None for ever; `total` is the whole request's limit where that comes first."""

    seconds: float | None
    total: float | None = None

    def __str__(self) -> str:
        if self.total is not None:
            return f"was not done within the request's {self.total:g} s"
        return f"gave nothing for {self.seconds:g} s"


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

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def call(
        self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str], *, leg: str, limit: Limit
    ) -> EngineReply:
        """POST and read the whole answer within the limit."""
        with _translated(endpoint, leg, limit):
            async with asyncio.timeout(limit.seconds):
                reply = await self._client.post(endpoint.url + path, content=body, headers=_raw(headers))
        return EngineReply(reply.status_code, reply.headers, reply.content)

    async def get(self, endpoint: Endpoint, path: str, limit: float, headers: Mapping[str, str]) -> EngineReply:
        """GET within `limit` seconds."""
        with _translated(endpoint, path, Limit(limit)):
            async with asyncio.timeout(limit):
                reply = await self._client.get(endpoint.url + path, headers=_raw(headers))
        return EngineReply(reply.status_code, reply.headers, reply.content)

    @asynccontextmanager
    async def stream(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        leg: str,
        patience: Callable[[], Limit],
    ) -> AsyncIterator[EngineStream]:
        """POST and give status and headers as soon as they are there; the connection closes with the block.

        `patience` is asked anew for each wait: for the headers, then for each piece.
        """
        request = self._client.build_request("POST", endpoint.url + path, content=body, headers=_raw(headers))
        limit = patience()
        with _translated(endpoint, leg, limit):
            async with asyncio.timeout(limit.seconds):
                reply = await self._client.send(request, stream=True)
        try:
            yield EngineStream(reply.status_code, reply.headers, _chunks(endpoint, reply, leg, patience))
        finally:
            await reply.aclose()


async def _chunks(
    endpoint: Endpoint, reply: httpx.Response, leg: str, patience: Callable[[], Limit]
) -> AsyncIterator[bytes]:
    iterator = aiter(reply.aiter_bytes())
    while True:
        limit = patience()
        with _translated(endpoint, leg, limit):
            try:
                async with asyncio.timeout(limit.seconds):
                    chunk = await anext(iterator)
            except StopAsyncIteration:
                return
        yield chunk


def make_http_client(timeouts: Timeouts) -> httpx.AsyncClient:
    """Return a client fit for thousands of streams: no limit on connections, no proxy from the environment."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=timeouts.connect),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S),
        trust_env=False,
    )


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as bytes: a client's may hold more than ASCII, which the library would refuse as text."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


@contextmanager
def _translated(endpoint: Endpoint, leg: str, limit: Limit) -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise EngineFailedError(f"{leg}: {endpoint.name} refuses connections", refused=True) from error
    except TimeoutError as error:
        raise EngineTimeoutError(f"{leg}: {endpoint.name} {limit}", counts=limit.total is None) from error
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
        raise EngineFailedError(f"{leg}: {endpoint.name} broke off: {type(error).__name__}") from error
