"""The admin listener: state and metrics for whoever may reach it. It is bound to loopback unless asked otherwise."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI, Response

from proxy.inference import Services
from proxy.own_routes import OwnRoutes


def create_admin_app(services: Services) -> FastAPI:
    """Return the application; it starts and stops nothing, the public one does."""
    own = OwnRoutes(services)
    app = FastAPI(title="pdcluster admin", docs_url=None, redoc_url=None)

    async def endpoints() -> Response:
        """Answer with every endpoint: name, role, URL, state and why, requests in flight."""
        found: list[dict[str, Any]] = [
            {
                "name": endpoint.name,
                "role": endpoint.role,
                "url": endpoint.url,
                "state": endpoint.state,
                "reason": endpoint.reason,
                "in_flight": endpoint.in_flight,
            }
            for endpoint in services.handoffs.pools.endpoints
        ]
        return Response(orjson.dumps({"endpoints": found}), media_type="application/json")

    app.add_api_route("/health", own.health, methods=["GET"])
    app.add_api_route("/ready", own.ready, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", own.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/endpoints", endpoints, methods=["GET"], response_model=None)
    return app
