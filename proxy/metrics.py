"""Every metric name of the proxy, in one place. Labels come from fixed sets and endpoint names, never from clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.endpoints import Endpoint
from proxy.kv_transfer_metrics import KvTransferCollector
from proxy.request import AGGREGATED_REASONS, KINDS, PASSED_ON
from proxy.shared_counts import SharedCounts
from proxy.tallies import Family, Tallies
from proxy.trace import Outcome, Trace

STATES = ("unknown", "ready", "unhealthy")
# What became of the question for a prompt's tokens: the first four are answers, the rest say why there is none.
TOKEN_RESULTS = (
    *("given", "kept", "rendered", "tokenized"),
    *("not_text", "unsupported", "refused", "no_endpoint", "timeout", "failed", "paused"),
)

# Fit for long contexts: a million tokens take minutes to prefill.
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 300, 600)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)

# Of API keys, by their sign: below 0 is before the others.
PRIORITIES = ("first", "normal", "last")
_ROUTES = (*KINDS, *PASSED_ON, "other")


def _each(*values: str) -> tuple[tuple[str], ...]:
    return tuple((value,) for value in values)


def _counter(name: str, text: str, label: str, *values: str) -> Family:
    return Family(name, text, (label,), _each(*values))


def _by_route(name: str, text: str, bounds: tuple[float, ...], routes: Iterable[str]) -> Family:
    return Family(name, text, ("route",), _each(*routes), bounds)


FAMILIES: tuple[Family, ...] = (
    Family(
        "requests",
        "Requests by route and how they ended",
        ("route", "outcome"),
        tuple(product(_ROUTES, get_args(Outcome))),
    ),
    _counter("aggregated_requests", "Requests that must run on decode alone", "reason", *AGGREGATED_REASONS),
    _counter(
        "fallbacks",
        "Requests served by decode alone for want of a prefill",
        "reason",
        *("no_prefill", "prefill_failed", "no_handoff"),
    ),
    _counter(
        "retries",
        "New placements after an engine failed before the first byte",
        "leg",
        *("prefill", "lease", "decode"),
    ),
    Family("handoffs_stranded", "Prefills whose KV waits for the end of its lease"),
    Family("handoffs_released", "Prefills whose KV was given back before any decode knew of it"),
    _counter(
        "refusals",
        "Requests refused by API key, its limits, or for want of a free engine",
        "reason",
        *("no_key", "unknown_key", "requests_per_minute", "tokens_per_minute"),
        *("deadline", "queue_timeout", "queue_full"),
    ),
    _counter("tokenizations", "Prompts whose tokens were asked for", "result", *TOKEN_RESULTS),
    Family("queue_seconds", "Body read to placement", ("priority",), _each(*PRIORITIES), _LONG),
    Family("prefill_seconds", "Prefill leg", bounds=_LONG),
    Family("handoff_seconds", "Prefill's reply to a stream's first event", bounds=_LONG),
    _by_route("time_to_first_token_seconds", "Request to first event of a stream", _LONG, KINDS),
    _by_route("time_per_output_token_seconds", "Mean time between a stream's events", _TOKEN, KINDS),
    _by_route("request_seconds", "Request to the last byte", _LONG, _ROUTES),
)
COLUMNS = sum(family.columns for family in FAMILIES)


class Metrics:
    """What the proxy counts, in its columns of the shared table; passed to whoever counts."""

    def __init__(
        self,
        endpoints: tuple[Endpoint, ...],
        counts: SharedCounts,
        first: int,
        kv_store: Path | None = None,
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        tallies = Tallies(FAMILIES, counts, first)
        self.kv_transfer = KvTransferCollector(kv_store)
        self._registry = CollectorRegistry()
        for collector in (EndpointCollector(endpoints, waiting), self.kv_transfer, tallies):
            self._registry.register(collector)
        self.requests = tallies.counter("requests")
        self.aggregated = tallies.counter("aggregated_requests")
        self.fallbacks = tallies.counter("fallbacks")
        self.retries = tallies.counter("retries")
        self.stranded = tallies.counter("handoffs_stranded")
        self.released = tallies.counter("handoffs_released")
        self.refused = tallies.counter("refusals")
        self.tokenizations = tallies.counter("tokenizations")
        self.queue = tallies.histogram("queue_seconds")
        self.prefill = tallies.histogram("prefill_seconds")
        self.handoff = tallies.histogram("handoff_seconds")
        self.ttft = tallies.histogram("time_to_first_token_seconds")
        self.tpot = tallies.histogram("time_per_output_token_seconds")
        self.total = tallies.histogram("request_seconds")

    def add(self, collector: Collector) -> None:
        """Show what another part of the proxy counts for itself."""
        self._registry.register(collector)

    def observe(self, trace: Trace) -> None:
        """Count a request that has ended."""
        route, first_byte, prefill_ended = trace.route, trace.first_byte, trace.prefill_ended
        self.requests.inc(route, trace.outcome)
        if trace.placed is not None:
            self.queue.observe(trace.placed - trace.began, trace.priority)
        if trace.prefill_began is not None and prefill_ended is not None:
            self.prefill.observe(prefill_ended - trace.prefill_began)
        if first_byte is not None and trace.events:
            if prefill_ended is not None:
                self.handoff.observe(first_byte - prefill_ended)
            self.ttft.observe(first_byte - trace.began, route)
            if trace.last_byte is not None and trace.events > 1:
                self.tpot.observe((trace.last_byte - first_byte) / (trace.events - 1), route)
        if trace.ended is not None:
            self.total.observe(trace.ended - trace.began, route)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes, of all workers."""
        return generate_latest(self._registry)


class EndpointCollector(Collector):
    """State and load of each endpoint, and how many requests wait, at the moment of a scrape."""

    def __init__(self, endpoints: tuple[Endpoint, ...], waiting: Callable[[], int]) -> None:
        self._endpoints = endpoints
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        in_flight = GaugeMetricFamily(
            "pdcluster_in_flight", "Requests in flight, of all workers", labels=["endpoint", "role"]
        )
        state = GaugeMetricFamily(
            "pdcluster_endpoint_state", "1 for the state that an endpoint is in", labels=["endpoint", "role", "state"]
        )
        for endpoint in self._endpoints:
            in_flight.add_metric([endpoint.name, endpoint.role], endpoint.in_flight)
            for name in STATES:
                state.add_metric([endpoint.name, endpoint.role, name], float(endpoint.state == name))
        yield from (in_flight, state)
        yield GaugeMetricFamily(
            "pdcluster_queue_length", "Requests that wait for an engine, of all workers", self._waiting()
        )
