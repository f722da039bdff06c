"""The contract of scheduling: filters drop endpoints, scorers rate the rest in [0, 1], a picker takes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from proxy.endpoints import Endpoint
from proxy.request import InferenceRequest


class Placement(NamedTuple):
    """Where a request runs: a pair, or decode alone with the reason why."""

    decode: Endpoint
    prefill: Endpoint | None
    reason: str = ""


class Filter(Protocol):
    """Drops endpoints that must not serve this request."""

    def filter(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """Return those that may."""
        ...


class Scorer(Protocol):
    """Rates endpoints for a request."""

    def score(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        """Return one score in [0, 1] for each endpoint, higher is better."""
        ...


class Picker(Protocol):
    """Takes one endpoint."""

    def pick(self, endpoints: Sequence[Endpoint], scores: Sequence[float]) -> Endpoint:
        """Return one of the endpoints; both sequences have the same length, at least one."""
        ...
