"""Every metric name of the proxy, in one place. Labels come from fixed sets and endpoint names, never from clients."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from proxy.endpoints import Endpoint
from proxy.kv_transfer_metrics import KvTransferCollector
from proxy.trace import Trace
from proxy.workers import METRICS_DIRECTORY

STATES = ("unknown", "ready", "unhealthy")

# Fit for long contexts: a million tokens take minutes to prefill.
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 300, 600)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics:
    """The proxy's registry; one a process, passed to whoever counts."""

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.registry = CollectorRegistry()
        directory = os.environ.get(METRICS_DIRECTORY)
        self.kv_transfer = KvTransferCollector(Path(directory) / "kv_transfer.json" if directory else None)
        self._read = CollectorRegistry()
        self._read.register(EndpointCollector(endpoints))
        self._read.register(self.kv_transfer)
        if directory:  # what all workers have counted, those that died included
            MultiProcessCollector(self._read, directory)  # type: ignore[no-untyped-call]
        counter, histogram = self._counter, self._histogram
        self._children: dict[tuple[Histogram, str], Histogram] = {}
        self._ended: dict[tuple[str, str], Counter] = {}
        self.requests = counter("requests", "Requests by route and how they ended", "route", "outcome")
        self.aggregated = counter("aggregated_requests", "Requests that must run on decode alone", "reason")
        self.fallbacks = counter("fallbacks", "Requests served by decode alone for want of a prefill", "reason")
        self.retries = counter("retries", "New placements after an engine failed before the first byte", "leg")
        self.stranded = counter("handoffs_stranded", "Prefills whose KV waits for the end of its lease")
        self.released = counter("handoffs_released", "Prefills whose KV was given back before any decode knew of it")
        self.refused = counter("refusals", "Requests refused by API key or its limits", "reason")
        self.queue = histogram("queue_seconds", "Body read to placement", _LONG)
        self.prefill = histogram("prefill_seconds", "Prefill leg", _LONG)
        self.handoff = histogram("handoff_seconds", "Prefill's reply to a stream's first event", _LONG)
        self.ttft = histogram("time_to_first_token_seconds", "Request to first event of a stream", _LONG, "route")
        self.tpot = histogram("time_per_output_token_seconds", "Mean time between a stream's events", _TOKEN, "route")
        self.total = histogram("request_seconds", "Request to the last byte", _LONG, "route")

    def observe(self, trace: Trace) -> None:
        """Count a request that has ended."""
        key = (trace.route, trace.outcome)
        counter = self._ended.get(key)
        if counter is None:
            counter = self._ended[key] = self.requests.labels(*key)
        counter.inc()
        if trace.placed is not None:
            self.queue.observe(trace.placed - trace.began)
        if trace.prefill_began is not None and trace.prefill_ended is not None:
            self.prefill.observe(trace.prefill_ended - trace.prefill_began)
        if trace.first_byte is not None:
            if trace.events and trace.prefill_ended is not None:
                self.handoff.observe(trace.first_byte - trace.prefill_ended)
            if trace.events:
                self._of_route(self.ttft, trace.route).observe(trace.first_byte - trace.began)
            if trace.last_byte is not None and trace.events > 1:
                self._of_route(self.tpot, trace.route).observe(
                    (trace.last_byte - trace.first_byte) / (trace.events - 1)
                )
        if trace.ended is not None:
            self._of_route(self.total, trace.route).observe(trace.ended - trace.began)

    def _of_route(self, histogram: Histogram, route: str) -> Histogram:
        """Return a histogram's child; looking it up by labels costs more than observing."""
        key = (histogram, route)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = histogram.labels(route)
        return child

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes: of all workers, where there are several."""
        if METRICS_DIRECTORY in os.environ:
            return generate_latest(self._read)
        return generate_latest(self._read) + generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdcluster_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"pdcluster_{name}", text, labels, registry=self.registry, buckets=buckets)


class EndpointCollector(Collector):
    """State and load of each endpoint at the moment of a scrape."""

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._endpoints = endpoints

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
