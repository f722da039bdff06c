"""What the proxy answers itself: health, readiness, metrics, models."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import Request, Response

from proxy.client import header_map
from proxy.engine_client import EngineReply
from proxy.errors import EngineFailedError, NoEndpointError
from proxy.firewall import headers_for_client, headers_for_engine
from proxy.inference import CALL_LIMIT_S, Services

_CLIENT_ERROR, _UNAVAILABLE = 400, 503


class OwnRoutes:
    """What the proxy answers itself."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def health(self) -> dict[str, str]:
        """Say that the proxy runs; engines are /ready's business."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """Answer 200 with at least one usable pair, 503 and what is missing without."""
        pools = self._services.handoffs.pools
        ready = pools.has_pair()
        body = {"ready": ready, "missing": list(pools.missing())}
        return Response(orjson.dumps(body), 200 if ready else _UNAVAILABLE, media_type="application/json")

    async def metrics(self) -> Response:
        """Answer with the proxy's metrics, of all its workers, and fresh KV transfer figures of the decode engines."""
        await self._services.watcher.scrape(self._services.metrics.kv_transfer)
        return Response(self._services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """Answer with the models of all ready decode endpoints, each once."""
        pools, client = self._services.handoffs.pools, self._services.client
        ready = pools.ready("decode")
        if not ready:
            raise NoEndpointError("no decode endpoint is ready; /ready says what is missing")
        headers = headers_for_engine(header_map(request.scope), self._services.ids.new(), self._services.authorization)
        replies = await asyncio.gather(
            *(client.get(endpoint, "/v1/models", CALL_LIMIT_S, headers) for endpoint in ready), return_exceptions=True
        )
        models: dict[str, Any] = {}
        for reply in replies:
            if isinstance(reply, EngineReply) and reply.status < _CLIENT_ERROR:
                for model in _models_of(reply.body):
                    models.setdefault(model["id"], model)
        if not models:
            first = next((reply for reply in replies if isinstance(reply, EngineReply)), None)
            if first is None:
                raise EngineFailedError("models: no decode endpoint answered")
            return Response(first.body, first.status, headers_for_client(first.headers))
        return Response(orjson.dumps({"object": "list", "data": list(models.values())}), media_type="application/json")


def _models_of(body: bytes) -> list[dict[str, Any]]:
    """Return the models of an engine's list; one that makes no sense has none."""
    try:
        listed = orjson.loads(body)["data"]
        return [model for model in listed if isinstance(model.get("id"), str)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
