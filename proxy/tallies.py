"""Counters and histograms in the table that all workers share: counting is one addition, rendering sums the rows.

Label values come from sets that are known beforehand, so that every series has its columns before workers are forked
and no client can make one. A sum is kept in whole microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.shared_counts import SharedCounts

_MICRO = 1e6
_Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name, and every combination of label values it can have; with bounds it is a histogram."""

    name: str
    text: str
    labels: _Labels = ()
    series: tuple[_Labels, ...] = ((),)
    bounds: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """The columns of one series: of a histogram its buckets, the one beyond all bounds, and the sum."""
        return len(self.bounds) + 2 if self.bounds else 1

    @property
    def columns(self) -> int:
        """The columns of all series."""
        return len(self.series) * self.width


class Counter:
    """Counts by label values."""

    def __init__(self, family: Family, counts: SharedCounts, first: int) -> None:
        self._cells = counts.mine
        self._columns = {labels: first + index for index, labels in enumerate(family.series)}

    def inc(self, *labels: str) -> None:
        """Count one; raises KeyError for label values that were not declared."""
        self._cells[self._columns[labels]] += 1


class Histogram:
    """Sorts durations into buckets."""

    def __init__(self, family: Family, counts: SharedCounts, first: int) -> None:
        self._cells = counts.mine
        self._bounds = family.bounds
        self._sum = len(family.bounds) + 1
        self._columns = {
            labels[0] if labels else "": first + i * family.width for i, labels in enumerate(family.series)
        }

    def observe(self, seconds: float, label: str = "") -> None:
        """Count a duration; raises KeyError for a label value that was not declared."""
        first = self._columns[label]
        cells = self._cells
        cells[first + bisect_left(self._bounds, seconds)] += 1
        cells[first + self._sum] += int(seconds * _MICRO)


class Tallies(Collector):
    """All families, from a first column of the table on. Series that nothing was counted for are not rendered."""

    def __init__(self, families: Sequence[Family], counts: SharedCounts, first: int) -> None:
        self._counts = counts
        self._families: dict[str, tuple[Family, int]] = {}
        for family in families:
            self._families[family.name] = (family, first)
            first += family.columns

    def counter(self, name: str) -> Counter:
        """Return what counts for a family."""
        family, first = self._families[name]
        return Counter(family, self._counts, first)

    def histogram(self, name: str) -> Histogram:
        """Return what observes for a family; it has one label at the most."""
        family, first = self._families[name]
        return Histogram(family, self._counts, first)

    def collect(self) -> Iterable[Metric]:
        """Yield the families, summed over all workers, those that died included."""
        for family, first in self._families.values():
            yield self._histograms(family, first) if family.bounds else self._counters(family, first)

    def _counters(self, family: Family, first: int) -> Metric:
        metric = CounterMetricFamily(f"pdcluster_{family.name}", family.text, labels=family.labels)
        for labels, (value,) in self._series(family, first):
            if value or not labels:
                metric.add_metric(labels, value)
        return metric

    def _histograms(self, family: Family, first: int) -> Metric:
        metric = HistogramMetricFamily(f"pdcluster_{family.name}", family.text, labels=family.labels)
        for labels, (*buckets, total) in self._series(family, first):
            if any(buckets) or not labels:
                named = zip([*map(_bound, family.bounds), "+Inf"], accumulate(buckets), strict=True)
                metric.add_metric(labels, buckets=list(named), sum_value=total / _MICRO)
        return metric

    def _series(self, family: Family, first: int) -> Iterator[tuple[_Labels, list[int]]]:
        for index, labels in enumerate(family.series):
            yield labels, self._counts.totals(first + index * family.width, family.width)


def _bound(value: float) -> str:
    return str(float(value))
