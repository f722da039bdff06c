"""Metrics of following: of the worker that answers the scrape, since each follows for itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.endpoints import Endpoint
from proxy.kv_events.following import KvEvents

_LABELS = ("endpoint", "rank")
_GAUGES = {
    "current": "1 where an engine's KV events were heard, or known to be none, within seconds",
    "complete": "1 where all KV events since an engine's start are known",
    "blocks": "KV blocks that are known to be held",
}
_COUNTERS = {
    "batches": "Batches of KV events applied",
    "gaps": "Gaps in the numbers of batches, closed or not",
    "restarts": "Restarts of engines that were noticed",
    "garbage": "Messages and events that could not be used",
}


class KvEventsCollector(Collector):
    """How each publisher is followed, at the moment of a scrape."""

    def __init__(self, events: KvEvents, endpoints: Sequence[Endpoint]) -> None:
        self._events = events
        self._endpoints = endpoints

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        gauges = {
            name: GaugeMetricFamily(f"pdcluster_kv_events_{name}", text, labels=_LABELS)
            for name, text in _GAUGES.items()
        }
        counters = {
            name: CounterMetricFamily(f"pdcluster_kv_events_{name}", text, labels=_LABELS)
            for name, text in _COUNTERS.items()
        }
        for publisher, progress in self._events.progress().items():
            labels = (self._endpoints[publisher.endpoint].name, str(publisher.rank))
            gauges["current"].add_metric(labels, float(self._events.current(publisher)))
            gauges["complete"].add_metric(labels, float(progress.complete))
            gauges["blocks"].add_metric(labels, self._events.index.blocks(publisher))
            for name, family in counters.items():
                family.add_metric(labels, getattr(progress, name))
        yield from (*gauges.values(), *counters.values())
