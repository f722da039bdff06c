"""Scorers: how well an endpoint suits a request, in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.endpoints import Endpoint
from proxy.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class LeastInFlight:
    """1 for an idle endpoint, less with each request in flight there."""

    def score(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:  # noqa: ARG002
        """Return 1 / (1 + requests in flight) for each endpoint."""
        return [1 / (1 + endpoint.in_flight) for endpoint in endpoints]
