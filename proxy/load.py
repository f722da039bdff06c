"""Look at engines: probe their /health at an interval, and read their /metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineClient
from proxy.errors import EngineFailedError, EngineTimeoutError
from proxy.kv_transfer_metrics import KvTransferCollector

_LOG = logging.getLogger("proxy.load")
_PROBE_LIMIT_S = 5.0
_SCRAPE_LIMIT_S = 1.0
_FRESH_S = 1.0
_OK = 200


class Watcher:
    """Keeps endpoint states true. A busy engine is not dead: silence must repeat, a refused connection need not."""

    def __init__(
        self,
        pools: Pools,
        client: EngineClient,
        interval: float,
        headers: bytes,
        clock: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._client = client
        self._interval = interval
        self._headers = headers
        self._clock = clock
        self._scraped = float("-inf")
        self._unseen = {endpoint.name for endpoint in pools.endpoints}
        self._seen_all = asyncio.Event()

    async def run(self) -> None:
        """Probe all endpoints for ever; each has its own rhythm, so that a silent one delays nobody."""
        async with asyncio.TaskGroup() as group:
            for endpoint in self._pools.endpoints:
                group.create_task(self._probe_for_ever(endpoint))

    async def looked_once(self, seconds: float) -> None:
        """Wait until every endpoint has been probed, but not for longer: a proxy starts whatever its engines do."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._seen_all.wait()

    async def probe(self, endpoint: Endpoint) -> None:
        """Ask one endpoint for its health."""
        try:
            reply = await self._client.get(endpoint, "/health", _PROBE_LIMIT_S, self._headers)
        except EngineTimeoutError as error:
            self._pools.failed(endpoint, error.message)
        except EngineFailedError as error:
            if error.counts:
                self._pools.failed(endpoint, error.message, fatal=error.refused)
        else:
            if reply.status == _OK:
                self._pools.probed(endpoint)
            else:
                self._pools.failed(endpoint, f"/health answers {reply.status}", fatal=True)

    async def scrape(self, collector: KvTransferCollector) -> None:
        """Read the decode engines' metrics, unless they were read within the last second."""
        if self._clock() - self._scraped < _FRESH_S:
            return
        self._scraped = self._clock()
        decodes = self._pools.ready("decode")
        await asyncio.gather(*(self._scrape_one(endpoint, collector) for endpoint in decodes))

    async def _scrape_one(self, endpoint: Endpoint, collector: KvTransferCollector) -> None:
        try:
            reply = await self._client.get(endpoint, "/metrics", _SCRAPE_LIMIT_S, self._headers)
        except EngineFailedError:
            return  # the last figures stand; its health is the probe's business
        if reply.status == _OK:
            collector.update(endpoint.name, reply.body.decode("utf-8", "replace"))

    async def _probe_for_ever(self, endpoint: Endpoint) -> None:
        while True:
            try:
                await self.probe(endpoint)
            except Exception as error:  # noqa: BLE001 - a bug here must not end the probes of all endpoints
                _LOG.exception("bug while probing %s", endpoint.name)
                self._pools.failed(endpoint, f"cannot be probed: {type(error).__name__}", fatal=True)
            self._unseen.discard(endpoint.name)
            if not self._unseen:
                self._seen_all.set()
            await asyncio.sleep(self._interval)
