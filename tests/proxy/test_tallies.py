"""Metrics in the shared table: where a value is counted, what several workers sum up to, what Prometheus gets."""

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from proxy.metrics import COLUMNS, FAMILIES, Metrics
from proxy.shared_counts import SharedCounts
from proxy.tallies import Family, Tallies
from proxy.trace import Trace

BOUNDS = (0.25, 1.0, 4.0)
PLAIN = Family("plain", "A count without labels")
PAIRED = Family("paired", "A count by two labels", ("a", "b"), (("x", "1"), ("x", "2"), ("y", "1"), ("y", "2")))
TIMES = Family("times", "Durations", bounds=BOUNDS)
BY_ROUTE = Family("by_route", "Durations by route", ("route",), (("/a",), ("/b",)), BOUNDS)
ALL = (PLAIN, PAIRED, TIMES, BY_ROUTE)
WIDTH = sum(family.columns for family in ALL)


def made(rows=1, before=0, after=0):
    """The table, and the families in it with other columns on both sides."""
    counts = SharedCounts(before + WIDTH + after, rows, volatile=before)
    return counts, Tallies(ALL, counts, before)


def text_of(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def samples(collector):
    return {(item.name, *item.labels.values()): item.value for family in collector.collect() for item in family.samples}


@pytest.mark.parametrize(
    ("seconds", "buckets"),
    [
        (0.0, (1, 1, 1, 1)),
        (0.25, (1, 1, 1, 1)),
        (0.250001, (0, 1, 1, 1)),
        (1.0, (0, 1, 1, 1)),
        (4.0, (0, 0, 1, 1)),
        (4.1, (0, 0, 0, 1)),
        (1e9, (0, 0, 0, 1)),
    ],
)
def test_a_value_belongs_to_the_first_bucket_whose_bound_it_does_not_pass(seconds, buckets):
    _, tallies = made()
    tallies.histogram("times").observe(seconds)
    seen = samples(tallies)
    assert tuple(seen["pdcluster_times_bucket", le] for le in ("0.25", "1.0", "4.0", "+Inf")) == buckets
    assert seen[("pdcluster_times_count",)] == 1
    assert seen[("pdcluster_times_sum",)] == pytest.approx(seconds, abs=1e-6)


def test_series_do_not_run_into_one_another_or_into_what_else_is_in_the_table():
    counts, tallies = made(before=2, after=3)
    for labels in PAIRED.series:
        tallies.counter("paired").inc(*labels)
    for index, (route,) in enumerate(BY_ROUTE.series):
        for _ in range(index + 1):
            tallies.histogram("by_route").observe(9.0, route)
            tallies.histogram("by_route").observe(0.0, route)
    seen = samples(tallies)
    assert [seen["pdcluster_paired_total", *labels] for labels in PAIRED.series] == [1, 1, 1, 1]
    assert (seen["pdcluster_by_route_count", "/a"], seen["pdcluster_by_route_count", "/b"]) == (2, 4)
    assert (seen["pdcluster_by_route_sum", "/a"], seen["pdcluster_by_route_sum", "/b"]) == (9, 18)
    assert [counts.total(column) for column in (0, 1, -3, -2, -1)] == [0] * 5


def test_workers_count_in_rows_of_their_own_and_any_of_them_tells_the_sum():
    counts, tallies = made(rows=3, before=1)
    for row in range(3):
        counts.take_row(row)  # as each process does after its fork
        count, times = tallies.counter("plain"), tallies.histogram("times")
        for _ in range(10**row):
            count.inc()
            times.observe(row)
    for row in range(3):
        counts.mine = counts._table[row]
        seen = samples(tallies)
        assert seen[("pdcluster_plain_total",)] == seen[("pdcluster_times_count",)] == 111
        assert seen["pdcluster_times_bucket", "0.25"] == 1
        assert seen["pdcluster_times_bucket", "1.0"] == 11
        assert seen[("pdcluster_times_sum",)] == 210


def test_what_a_worker_counted_outlives_it():
    counts, tallies = made(rows=2, before=1)
    counts.mine[0] = 7  # requests in flight there
    tallies.counter("plain").inc()
    tallies.histogram("times").observe(1.0)
    before = samples(tallies)
    counts.clear(0)
    assert samples(tallies) == before
    assert counts.total(0) == 0


@pytest.mark.parametrize("labels", [("z", "1"), ("x",), (), ("x", "1", "1")], ids=str)
def test_label_values_that_were_not_declared_are_refused_and_nothing_is_counted(labels):
    _, tallies = made()
    before = samples(tallies)
    with pytest.raises(KeyError):
        tallies.counter("paired").inc(*labels)
    assert samples(tallies) == before


@pytest.mark.parametrize(("name", "label"), [("by_route", "/c"), ("by_route", ""), ("times", "/a")])
def test_a_duration_under_a_label_that_was_not_declared_is_refused_and_nothing_is_counted(name, label):
    _, tallies = made()
    before = samples(tallies)
    with pytest.raises(KeyError):
        tallies.histogram(name).observe(1.0, label)
    assert samples(tallies) == before


def test_a_family_that_nobody_declared_is_refused():
    _, tallies = made()
    with pytest.raises(KeyError):
        tallies.counter("unheard_of")


class Reference:
    """The same families by prometheus-client's own classes."""

    def __init__(self, families):
        self.registry = CollectorRegistry()
        self.made = {}
        for family in families:
            name = f"pdcluster_{family.name}"
            if family.bounds:
                it = prometheus_client.Histogram(
                    name, family.text, family.labels, buckets=family.bounds, registry=self.registry
                )
            else:
                it = prometheus_client.Counter(name, family.text, family.labels, registry=self.registry)
            self.made[family.name] = it

    def of(self, name, *labels):
        return self.made[name].labels(*labels) if labels else self.made[name]

    def text(self):
        """What is scraped, less the moments at which the series were made, which ours do not tell."""
        lines = generate_latest(self.registry).decode().splitlines(keepends=True)
        return "".join(line for line in lines if "_created" not in line)


VALUES = (0.0, 0.25, 0.5, 1.0, 3.75, 4.0, 17.5, 0.125, 1234567.0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("counted", [False, True], ids=["nothing", "something"])
def test_the_text_is_what_prometheus_client_prints_for_the_same_values(workers, counted):
    counts, tallies = made(rows=workers)
    reference = Reference(ALL)
    if counted:
        for row in range(workers):
            counts.mine = counts._table[row]
            ours = Tallies(ALL, counts, 0)
            for index, value in enumerate(VALUES):
                ours.histogram("times").observe(value)
                reference.of("times").observe(value)
                ours.histogram("by_route").observe(value, "/b")
                reference.of("by_route", "/b").observe(value)
                ours.counter("paired").inc("y", "12"[index % 2])
                reference.of("paired", "y", "12"[index % 2]).inc()
            ours.counter("plain").inc()
            reference.of("plain").inc()
    assert text_of(tallies) == reference.text()
    assert 'route="/a"' not in reference.text()


def test_every_family_of_the_proxy_is_printed_as_prometheus_client_would_and_all_fit_their_columns():
    counts = SharedCounts(COLUMNS + 1)
    metrics, reference = Metrics((), counts, 0), Reference(FAMILIES)
    trace = Trace("/v1/completions", 0.0, placed=0.5, prefill_began=0.5, prefill_ended=1.0, first_byte=1.25)
    trace.last_byte, trace.events, trace.ended = 2.25, 5, 2.5
    metrics.observe(trace)
    reference.of("queue_seconds", "normal").observe(0.5)
    for name, value in (("prefill", 0.5), ("handoff", 0.25)):
        reference.of(f"{name}_seconds").observe(value)
    for name, value in (("time_to_first_token", 1.25), ("time_per_output_token", 0.25), ("request", 2.5)):
        reference.of(f"{name}_seconds", "/v1/completions").observe(value)
    reference.of("requests", "/v1/completions", "ok").inc()
    for family in FAMILIES:  # every series that can be has columns
        for labels in family.series:
            if family.bounds:
                metrics_of(metrics, family).observe(0.5, *labels)
                reference.of(family.name, *labels).observe(0.5)
            else:
                metrics_of(metrics, family).inc(*labels)
                reference.of(family.name, *labels).inc()
    names = tuple(f"pdcluster_{family.name}" for family in FAMILIES)
    ours = [
        line for line in metrics.render().decode().splitlines() if any(name in line.split("{")[0] for name in names)
    ]
    assert sorted(ours) == sorted(reference.text().splitlines())
    assert counts.total(COLUMNS) == 0


def metrics_of(metrics, family):
    names = {
        "aggregated_requests": "aggregated",
        "handoffs_stranded": "stranded",
        "handoffs_released": "released",
        "refusals": "refused",
        "queue_seconds": "queue",
        "prefill_seconds": "prefill",
        "handoff_seconds": "handoff",
        "time_to_first_token_seconds": "ttft",
        "time_per_output_token_seconds": "tpot",
        "request_seconds": "total",
    }
    return getattr(metrics, names.get(family.name, family.name))
