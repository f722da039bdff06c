"""Follow all publishers of all endpoints, and say whose part of the block index can be believed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from proxy.config import KvEventSource
from proxy.endpoints import Endpoint
from proxy.engine_client import EngineClient
from proxy.errors import EngineFailedError
from proxy.kv_events.feed import Feed
from proxy.kv_events.follower import Follower, Patience, Progress
from proxy.kv_events.sources import SOURCES_PATH, read_sources
from proxy.scheduling.block_index import BlockIndex, Publisher

_LOG = logging.getLogger("proxy.kv_events")
_ASK_LIMIT_S = 5.0
_OK = 200
_NOT_FOUND = 404


class _MovedError(Exception):
    """An engine publishes elsewhere now."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What to follow: of `endpoints`, those that `given` names, at their sources by rank; () is to ask the engine.

    Seconds: `again` between looks at where an engine publishes; `retry` and `longest` the first and the longest pause
    after a failure.
    """

    endpoints: Sequence[Endpoint]
    given: Mapping[str, Sequence[KvEventSource]]
    patience: Patience = field(default_factory=Patience)
    again: float = 60.0
    retry: float = 1.0
    longest: float = 15.0


class KvEvents:
    """Followers of endpoints' publishers, and the index they keep. An endpoint's number is its place in `endpoints`."""

    def __init__(
        self,
        followed: Followed,
        index: BlockIndex,
        client: EngineClient,
        headers: bytes,
        clock: Callable[[], float],
    ) -> None:
        self.index = index
        self._followed = followed
        self._client = client
        self._headers = headers
        self._clock = clock
        self._followers: dict[Publisher, Follower] = {}
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Follow for ever."""
        context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as group:
                for number, endpoint in enumerate(self._followed.endpoints):
                    if endpoint.name in self._followed.given:
                        group.create_task(self._follow_for_ever(context, number, endpoint))
        finally:
            context.destroy(linger=0)

    def exact(self, publisher: Publisher) -> bool:
        """Tell whether the index has all that this publisher holds, as of a few seconds ago at most."""
        follower = self._followers.get(publisher)
        return follower is not None and follower.current and follower.progress.complete

    def current(self, publisher: Publisher) -> bool:
        """Tell whether what the index says of this publisher is there; it may hold more."""
        follower = self._followers.get(publisher)
        return follower is not None and follower.current

    def progress(self) -> Mapping[Publisher, Progress]:
        """Return how each publisher is followed."""
        return {publisher: follower.progress for publisher, follower in self._followers.items()}

    async def _follow_for_ever(self, context: zmq.asyncio.Context, number: int, endpoint: Endpoint) -> None:
        pause = self._followed.retry
        while True:
            began = self._clock()
            try:
                await self._follow(context, number, endpoint)
            except* (EngineFailedError, ValueError, zmq.ZMQError) as errors:
                self._say(endpoint, str(errors.exceptions[0]))
            except* _MovedError:
                self._say(endpoint, "publishes elsewhere now")
            except* Exception:  # noqa: BLE001 - a bug here must not end what the others do
                _LOG.exception("bug while following %s", endpoint.name)
            pause = self._followed.retry if self._clock() - began > self._followed.again else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._followed.longest)

    async def _follow(self, context: zmq.asyncio.Context, number: int, endpoint: Endpoint) -> None:
        """Follow an endpoint's ranks until something is wrong."""
        sources = await self._sources(endpoint)
        async with self._ranks(context, number, sources) as ranks, asyncio.TaskGroup() as group:
            for follower in ranks:
                group.create_task(follower.run())
            if ranks:
                self._say(endpoint, f"followed at {', '.join(source.publish for source in sources.values())}")
            while True:
                await asyncio.sleep(self._followed.again)
                with suppress(EngineFailedError, ValueError):  # its followers know better whether it is there
                    if await self._sources(endpoint) != sources:
                        raise _MovedError

    @asynccontextmanager
    async def _ranks(
        self, context: zmq.asyncio.Context, number: int, sources: Mapping[int, KvEventSource]
    ) -> AsyncIterator[Sequence[Follower]]:
        mine = {}
        for rank, source in sources.items():
            publisher = Publisher(number, rank)
            feed = Feed(self.index, publisher)
            mine[publisher] = Follower(source, feed, context, self._clock, self._followed.patience)
        self._followers |= mine
        try:
            yield list(mine.values())
        finally:
            for publisher in mine:
                del self._followers[publisher]

    async def _sources(self, endpoint: Endpoint) -> Mapping[int, KvEventSource]:
        given = self._followed.given[endpoint.name]
        if given:
            return dict(enumerate(given))
        reply = await self._client.get(endpoint, SOURCES_PATH, _ASK_LIMIT_S, self._headers)
        if reply.status == _NOT_FOUND:
            raise ValueError(f"{SOURCES_PATH} is not known there: give its addresses with --kv-events")
        if reply.status != _OK:
            raise ValueError(f"{SOURCES_PATH} answers {reply.status}")
        found = read_sources(reply.body, endpoint.url)
        if not found:
            raise ValueError("publishes no KV events: start it with --kv-events-config")
        return found

    def _say(self, endpoint: Endpoint, what: str) -> None:
        """Log a change, once."""
        if self._said.get(endpoint.name) != what:
            self._said[endpoint.name] = what
            _LOG.info("%s: KV events: %s", endpoint.name, what)
