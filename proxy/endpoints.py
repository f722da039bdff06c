"""Engines as the proxy sees them: health, requests in flight, and reservations that are given back exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from proxy.config import EndpointConfig, Role
from proxy.shared_counts import SharedCounts

State = Literal["unknown", "ready", "unhealthy"]

# Failures in a row that take an endpoint out; a refused connection does so at once.
_FAILURES_TO_EJECT = 2


@dataclass(slots=True)
class Endpoint:
    """One engine. `state` changes by probes and by what requests met; 4xx answers never count."""

    config: EndpointConfig
    state: State = "unknown"
    counts: SharedCounts = field(default_factory=lambda: SharedCounts(1), repr=False)
    column: int = 0  # where in `counts` its requests in flight are
    failures: int = 0
    reason: str = "not probed yet"
    ready: bool = False  # requests may go there
    name: str = field(init=False)  # in metrics and logs
    url: str = field(init=False)
    role: Role = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.url, self.role = self.config.name, self.config.url, self.config.role

    @property
    def in_flight(self) -> int:
        """The requests in flight there, of all workers."""
        return self.counts.total(self.column)

    def take(self) -> None:
        """Count a request as in flight; `give` ends that."""
        self.counts.mine[self.column] += 1

    def give(self) -> None:
        """Count it no more."""
        self.counts.mine[self.column] -= 1

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Count a request as in flight for the length of the block."""
        self.take()
        try:
            yield
        finally:
            self.give()


@dataclass(slots=True)
class Pools:
    """All endpoints and the pairs that must not be used; `on_change` hears of every change of state."""

    endpoints: tuple[Endpoint, ...]
    excluded: frozenset[tuple[str, str]] = frozenset()
    on_change: Callable[[Endpoint, State], None] = field(default=lambda _endpoint, _state: None)
    on_sort: Callable[[], None] = field(default=lambda: None, repr=False)  # hears that other endpoints are ready now
    generation: int = 0  # of the lists of ready endpoints
    _ready: dict[Role, list[Endpoint]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._sort()

    def ready(self, role: Role) -> Sequence[Endpoint]:
        """Return the endpoints of one pool that requests may go to."""
        return self._ready[role]

    def partners(self, decode: Endpoint) -> Sequence[Endpoint]:
        """Return the ready prefill endpoints that may serve with this decode endpoint."""
        ready = self._ready["prefill"]
        if not self.excluded:
            return ready
        return [prefill for prefill in ready if (prefill.name, decode.name) not in self.excluded]

    def has_pair(self) -> bool:
        """Tell whether one prefill and one decode can serve together now."""
        return any(self.partners(decode) for decode in self._ready["decode"])

    def succeeded(self, endpoint: Endpoint) -> None:
        """Note that an endpoint answered as it should."""
        endpoint.failures = 0

    def failed(self, endpoint: Endpoint, reason: str, *, fatal: bool = False) -> None:
        """Note a transport error, 5xx or failed probe; enough of them take the endpoint out until a probe succeeds."""
        endpoint.failures += 1
        if fatal or endpoint.failures >= _FAILURES_TO_EJECT:
            self._change(endpoint, "unhealthy", reason)

    def probed(self, endpoint: Endpoint) -> None:
        """Note a successful probe."""
        endpoint.failures = 0
        self._change(endpoint, "ready", "")

    def missing(self) -> Iterable[str]:
        """Say in words what keeps the proxy from being ready."""
        for endpoint in self.endpoints:
            if not endpoint.ready:
                yield f"{endpoint.name} is {endpoint.state}: {endpoint.reason}"
        for prefill, decode in sorted(self.excluded):
            yield f"{prefill} and {decode} are excluded from serving together"

    def _change(self, endpoint: Endpoint, state: State, reason: str) -> None:
        before, endpoint.state, endpoint.reason = endpoint.state, state, reason
        endpoint.ready = state == "ready"
        if before != state:
            self._sort()
            self.on_change(endpoint, before)
            self.on_sort()

    def _sort(self) -> None:
        roles: tuple[Role, ...] = ("prefill", "decode")
        self._ready = {role: [item for item in self.endpoints if item.ready and item.role == role] for role in roles}
        self.generation += 1
