"""Filters: endpoints that must not serve a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from proxy.endpoints import Endpoint
from proxy.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class Untried:
    """Drops endpoints that already failed this request, unless none would be left."""

    tried: Collection[str]

    def filter(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:  # noqa: ARG002
        """Return those not tried yet, or all."""
        return [endpoint for endpoint in endpoints if endpoint.name not in self.tried] or list(endpoints)
