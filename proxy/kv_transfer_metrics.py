"""KV transfer figures of the decode engines, as metrics of the proxy.

vLLM 0.32 keeps them as `vllm:nixl_xfer_time_seconds` and `vllm:nixl_bytes_transferred` (histograms, one a transfer)
and `vllm:nixl_num_failed_transfers` (a counter) on the engine that fetches. A restarted engine begins at zero again;
what it had counted before is kept, so that ours only grow.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_LINE = re.compile(
    r"^vllm:nixl_(xfer_time_seconds|bytes_transferred|num_failed_transfers)(_bucket|_sum|_count|_total)?"
    r"(?:\{([^}]*)\})? (\S+)",
    re.MULTILINE,
)
_BOUND = re.compile(r'(?:^|,)le="([^"]+)"')

# Sample (which figure, part of it, upper bound or "") -> value.
Figures = dict[tuple[str, str, str], float]


def parse_figures(text: str) -> Figures:
    """Return the samples of interest in an engine's /metrics text, summed over its ranks."""
    figures: Figures = {}
    for name, part, labels, value in _LINE.findall(text):
        bound = _BOUND.search(labels)
        try:
            number, _ = float(value), float(bound[1]) if bound else 0.0
        except ValueError:
            continue  # no figure
        key = (name, part, bound[1] if bound else "")
        figures[key] = figures.get(key, 0.0) + number
    return figures


@dataclass(slots=True)
class _Accumulated:
    """An engine's figures over its restarts."""

    base: Figures = field(default_factory=dict)
    latest: Figures = field(default_factory=dict)

    def update(self, figures: Figures) -> None:
        if any(figures.get(key, 0.0) < value for key, value in self.latest.items()):
            self.base = self.totals()
        self.latest = figures

    def totals(self) -> Figures:
        keys = self.base.keys() | self.latest.keys()
        return {key: self.base.get(key, 0.0) + self.latest.get(key, 0.0) for key in keys}


class KvTransferCollector(Collector):
    """Renders the latest figures of each decode endpoint.

    Workers share them in a file, `store`: whichever of them is asked must not know less than the one asked before.
    """

    def __init__(self, store: Path | None = None) -> None:
        self._engines: dict[str, _Accumulated] = {}
        self._store = store

    def update(self, decode: str, text: str) -> None:
        """Take in an engine's /metrics text."""
        figures = parse_figures(text)
        if self._store is None:
            self._engines.setdefault(decode, _Accumulated()).update(figures)
            return
        with self._store.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            self._engines = _decoded(file.read())
            self._engines.setdefault(decode, _Accumulated()).update(figures)
            file.truncate(0)
            file.write(_encoded(self._engines))

    def collect(self) -> Iterable[Metric]:
        """Yield the families; called at each scrape."""
        seconds = HistogramMetricFamily("pdcluster_kv_transfer_seconds", "Time of a KV transfer", labels=["decode"])
        size = HistogramMetricFamily("pdcluster_kv_transfer_bytes", "Bytes of a KV transfer", labels=["decode"])
        failed = CounterMetricFamily("pdcluster_kv_transfer_failures", "KV transfers that failed", labels=["decode"])
        for name, engine in self._engines.items():
            totals = engine.totals()
            for family, figure in ((seconds, "xfer_time_seconds"), (size, "bytes_transferred")):
                _add_histogram(family, name, figure, totals)
            failed.add_metric([name], totals.get(("num_failed_transfers", "_total", ""), 0.0))
        yield from (seconds, size, failed)


def _encoded(engines: dict[str, _Accumulated]) -> bytes:
    return orjson.dumps(
        {
            name: [[[*key, value] for key, value in part.items()] for part in (engine.base, engine.latest)]
            for name, engine in engines.items()
        }
    )


def _decoded(data: bytes) -> dict[str, _Accumulated]:
    stored = orjson.loads(data) if data else {}
    return {
        name: _Accumulated(*({(row[0], row[1], row[2]): row[3] for row in part} for part in parts))
        for name, parts in stored.items()
    }


def _add_histogram(family: HistogramMetricFamily, name: str, figure: str, totals: Figures) -> None:
    bounds = {bound: value for (kind, part, bound), value in totals.items() if kind == figure and part == "_bucket"}
    if not bounds:
        bounds = {"+Inf": 0.0}
    ordered = sorted(bounds.items(), key=lambda item: float(item[0]))
    family.add_metric([name], buckets=ordered, sum_value=totals.get((figure, "_sum", ""), 0.0))
