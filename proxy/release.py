"""Have prefill engines free KV that no decode will fetch, at once instead of at the end of its lease.

vLLM 0.32 has no call for that. A decode engine that refuses a request with a handoff in its handler tells prefill, so
such a request is sent. It is sent only where decode never saw the handoff: a second use of one is never safe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineClient, EngineRequest
from proxy.errors import EngineFailedError
from proxy.exchange import Exchange, Limit
from proxy.metrics import Metrics

_LOG = logging.getLogger("proxy.release")
_ROUTE = "/v1/completions"
_LIMIT_S = 5.0
_ANSWER_S = 0.25
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
        self._run(self._release(decode, body, headers))

    def expect(self, exchange: Exchange, then: Callable[[bytes], None]) -> None:
        """Give a prefill that nobody waits for any more a moment to answer, since its answer may be on the way.

        An engine frees the KV of a prefill that is cut off, but not of one that it has just answered.
        """
        self._run(self._expect(exchange, then))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, seconds: float) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def _expect(self, exchange: Exchange, then: Callable[[bytes], None]) -> None:
        try:
            body = await exchange.whole(Limit(_ANSWER_S), time.monotonic())
        except EngineFailedError:
            pass  # it was not done, and frees what it had
        else:
            then(body)
        finally:
            exchange.close()

    async def _release(self, decode: Endpoint, body: bytes, headers: bytes) -> None:
        request = EngineRequest(_ROUTE, body, headers)
        others = [endpoint for endpoint in self._pools.ready("decode") if endpoint is not decode]
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
