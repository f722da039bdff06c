"""Have prefill engines free KV that no decode will fetch, at once instead of at the end of its lease.

vLLM 0.32 has no call for that. A decode engine that refuses a request with a handoff in its handler tells prefill, so
such a request is sent. It is sent only where decode never saw the handoff: a second use of one is never safe.
"""

from __future__ import annotations

import asyncio
import logging

from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineClient, EngineRequest
from proxy.errors import EngineFailedError
from proxy.exchange import Limit
from proxy.metrics import Metrics

_LOG = logging.getLogger("proxy.release")
_ROUTE = "/v1/completions"
_LIMIT_S = 5.0
_REFUSALS = range(400, 500)


class Releases:
    """Releases under way; they outlive the requests that they belong to."""

    def __init__(self, client: EngineClient, pools: Pools, metrics: Metrics) -> None:
        self._client = client
        self._pools = pools
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, decode: Endpoint, body: bytes, headers: bytes) -> None:
        """Release one handoff by way of a decode endpoint, or of another one that is ready."""
        task = asyncio.create_task(self._release(decode, body, headers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, seconds: float) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def _release(self, decode: Endpoint, body: bytes, headers: bytes) -> None:
        request = EngineRequest(_ROUTE, body, headers)
        others = [endpoint for endpoint in self._pools.of_role("decode") if endpoint.ready and endpoint is not decode]
        for endpoint in [decode, *others[:1]] if decode.ready else others[:2]:
            try:
                reply = await self._client.call(endpoint, request, leg="release", limit=Limit(_LIMIT_S))
            except EngineFailedError as error:
                _LOG.warning("%s", error.summary)
                if error.refused:
                    continue  # it never heard of the handoff
                break
            if reply.status in _REFUSALS:
                self._metrics.released.inc()
                return
            _LOG.warning("release: %s answered %d", endpoint.name, reply.status)
            break
        self._metrics.stranded.inc()
