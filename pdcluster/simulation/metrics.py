"""/metrics of a simulated engine, under vLLM 0.32's names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdcluster.simulation.engine import Engine

# Bounds of vLLM's NIXL connector.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        """Return it as a metric."""
        family = HistogramMetricFamily(name, text, labels=list(labels))
        seen, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            seen += count
            buckets.append((bound, float(seen)))
        family.add_metric(list(labels.values()), buckets=buckets, sum_value=self.total)
        return family


class EngineMetrics(Collector):
    """Figures of one engine; those of transfers and ended requests are told, the others read from the engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._labels = {"engine": "0", "model_name": model}
        self._registry = CollectorRegistry(auto_describe=False)
        self.transfer_seconds = Histogram(_SECONDS)
        self.transfer_bytes = Histogram(_BYTES)
        self.failed_transfers = 0
        self.after_expiry = 0
        self._registry.register(self)

    def render(self) -> bytes:
        """Return the text of /metrics."""
        return generate_latest(self._registry)

    def transferred(self, seconds: float, size: float) -> None:
        """Count a transfer."""
        self.transfer_seconds.add(seconds)
        self.transfer_bytes.add(size)

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        engine, counts = self._engine, self._engine.counts
        yield self._gauge("num_requests_running", "Requests in the batch", engine.running)
        yield self._gauge("num_requests_waiting", "Requests that wait", engine.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV memory in use, 1 is all", engine.kv_usage)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up", counts.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found", counts.cached_tokens)
        yield self._counter("external_prefix_cache_queries", "Tokens asked of other engines", counts.pulled_tokens)
        yield self._counter("external_prefix_cache_hits", "Tokens got from other engines", counts.pulled_tokens)
        yield self._counter("prompt_tokens", "Prompt tokens", counts.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens made", counts.generated_tokens)
        yield self._counter("num_preemptions", "Preemptions", counts.preempted)
        yield self._cache_config()
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended", labels=[*self._labels, "finished_reason"]
        )
        success.add_metric([*self._labels.values(), "length"], counts.done)
        yield success
        yield self.transfer_seconds.family("vllm:nixl_xfer_time_seconds", "Time of a transfer", self._labels)
        yield self.transfer_bytes.family("vllm:nixl_bytes_transferred", "Bytes of a transfer", self._labels)
        yield self._counter("nixl_num_failed_transfers", "Transfers that failed", self.failed_transfers)
        yield self._counter("nixl_num_kv_expired_reqs", "Leases that ended", counts.expired)
        yield self._counter("nixl_num_notifications_after_expiry", "Fetched too late or twice", self.after_expiry)

    def _cache_config(self) -> GaugeMetricFamily:
        profile = self._engine.profile
        labels = {"block_size": str(profile.block_tokens), "engine": "0", "num_gpu_blocks": str(profile.kv_blocks)}
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
