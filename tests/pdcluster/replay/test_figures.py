"""Figures: percentiles that are values, goodput of requests that kept both targets, failures that count against it."""

import pytest

from pdcluster.replay.driver import Record, Run
from pdcluster.replay.figures import Percentiles, Targets, make_figures, percentiles


def record(ttft=0.1, tpot=0.01, *, tokens=11, prompt=1000, error="", told=None, cached=None, late=0.0):
    last = ttft + tpot * (tokens - 1)
    return Record(0.0, late, ttft, last, last, prompt, 11, tokens, told, cached, 200, error, error and "said")


def figures(*records, seconds=10.0, cpu=1.0):
    return make_figures(Run(records, seconds, cpu, 3), Targets())


def test_percentiles_are_the_smallest_value_that_so_many_do_not_exceed():
    assert percentiles(range(1, 101)) == Percentiles(50, 90, 95, 99, 100)
    assert percentiles([5]) == Percentiles(5, 5, 5, 5, 5)
    assert percentiles([2, 1]) == Percentiles(1, 2, 2, 2, 2)
    assert percentiles([]) == Percentiles(None, None, None, None, None)


@pytest.mark.parametrize(
    ("item", "met"),
    [
        (record(0.499), True),
        (record(0.501), False),
        (record(0.999, prompt=4000), True),
        (record(1.001, prompt=4000), False),
        (record(0.1, 0.0299), True),
        (record(0.1, 0.0301), False),
        (record(0.1, 9.9, tokens=1), True),
        (record(0.1, error="timeout"), False),
    ],
)
def test_a_request_is_in_target_when_first_token_and_pace_both_are(item, met):
    assert Targets().met(item) is met


def test_goodput_and_shares_are_of_all_requests():
    found = figures(record(), record(), record(9), record(0.1, 0.5), record(error="HTTP 503"))
    assert (found.requests, found.answered) == (5, 4)
    assert (found.in_target, found.ttft_in_target, found.tpot_in_target) == (0.4, 0.6, 0.6)
    assert found.goodput == pytest.approx(0.2)
    assert found.ttft.most == pytest.approx(9)


def test_failures_are_told_by_kind_with_the_first_words():
    found = figures(record(), record(error="timeout"), record(error="HTTP 503"), record(error="timeout"))
    assert [(item.kind, item.count, item.first) for item in found.failures] == [
        ("timeout", 2, "said"),
        ("HTTP 503", 1, "said"),
    ]


def test_what_no_usage_told_is_unknown():
    found = figures(record())
    assert (found.cached_share, found.prompt_tokens) == (None, None)
    found = figures(record(), record(told=1200, cached=600), record(told=800, cached=0), record(told=500))
    assert found.cached_share == pytest.approx(0.3)
    assert found.prompt_tokens == pytest.approx(2500 / 3000)


def test_the_generators_own_lateness_and_cost_are_figures():
    found = figures(*[record(late=0.001)] * 99, record(late=0.3), cpu=2.0)
    assert (found.generator.core_share, found.generator.cpu_us_per_request) == (0.2, 20_000)
    assert found.generator.lateness.p50 == pytest.approx(0.001)
    assert found.generator.lateness.most == pytest.approx(0.3)


def test_answers_that_ended_early_are_counted():
    assert figures(record(tokens=5), record()).ended_early == 1


def test_a_run_of_failures_alone_has_figures_too():
    found = figures(record(error="no connection"), seconds=0.0)
    assert (found.in_target, found.goodput, found.ttft.p50) == (0, 0, None)
