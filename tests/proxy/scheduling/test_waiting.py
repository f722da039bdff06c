"""The queue: priority first, then fairness between keys, then least slack; late ones last, but not never."""

import pytest

from proxy.scheduling.job import Job
from proxy.scheduling.waiting import Waiting


def job(latest_start, *, tokens=100.0, now=0.0, **more):
    made = Job(arrived=0.0, tokens=tokens, deadline=latest_start, **more)
    made.latest_start, made.late = latest_start, latest_start < now
    return made


def served(waiting, now=0.0, most=1000):
    """Take one after the other until none is left."""
    order = []
    while waiting and len(order) < most:
        first = waiting.candidates(now, 8)[0]
        waiting.take(first)
        order.append(first)
    return order


def test_what_must_begin_soonest_goes_first():
    waiting, jobs = Waiting(), [job(5.0), job(1.0), job(3.0)]
    for each in jobs:
        waiting.put(each)
    assert [each.latest_start for each in served(waiting)] == [1.0, 3.0, 5.0]


def test_a_lower_priority_number_goes_first_whatever_its_slack():
    waiting = Waiting()
    for each in (job(1.0, priority=1), job(9.0, priority=0), job(5.0, priority=-3)):
        waiting.put(each)
    assert [each.priority for each in served(waiting)] == [-3, 0, 1]


def test_late_requests_wait_behind_those_that_can_be_in_time_oldest_first():
    waiting = Waiting()
    second, first, hopeful = job(2.0), job(1.0), job(30.0)
    for each in (second, first, hopeful):
        waiting.put(each)
    assert waiting.candidates(10.0, 8) == [hopeful, first, second]


def test_late_requests_get_a_share_while_others_keep_coming():
    waiting = Waiting()
    late = job(-1.0)
    waiting.put(late)
    order = []
    while late not in order and len(order) < 200:
        waiting.put(job(1000.0))
        order.append(waiting.candidates(0.0, 8)[0])
        waiting.take(order[-1])
    assert 10 <= len(order) <= 50  # 3 % of the tokens


def test_keys_that_wait_share_tokens_not_requests():
    waiting = Waiting()
    for _ in range(100):
        waiting.put(job(1000.0, share="large", tokens=1000.0))
        waiting.put(job(1000.0, share="small", tokens=100.0))
    tokens = {"large": 0.0, "small": 0.0}
    for each in served(waiting, most=60):
        tokens[each.share] += each.tokens
    assert tokens["large"] == pytest.approx(tokens["small"], abs=1000)


def test_twice_the_weight_gets_twice_the_tokens():
    waiting = Waiting()
    for _ in range(100):
        waiting.put(job(1000.0, share="two", weight=2.0))
        waiting.put(job(1000.0, share="one"))
    order = [each.share for each in served(waiting, most=60)]
    assert order.count("two") == pytest.approx(40, abs=2)


def test_a_key_that_comes_anew_is_owed_nothing_for_the_time_before():
    waiting = Waiting()
    for _ in range(50):
        waiting.put(job(1000.0, share="old"))
    served(waiting, most=40)
    for _ in range(50):
        waiting.put(job(1000.0, share="new"))
    order = [each.share for each in served(waiting, most=20)]
    assert order.count("old") >= 9


def test_what_is_withdrawn_costs_its_key_nothing():
    waiting = Waiting()
    gone, stays, other = job(1.0, share="a"), job(2.0, share="a"), job(3.0, share="b")
    for each in (gone, stays, other):
        waiting.put(each)
    waiting.take(gone, served=False)
    assert waiting.tokens == 200.0
    assert {each.share for each in served(waiting)} == {"a", "b"}
    assert len(waiting) == 0
    assert waiting.tokens == 0.0


def test_the_lowest_priority_is_shed_first_and_of_it_the_one_with_the_most_time():
    waiting = Waiting()
    for each in (job(1.0, priority=2), job(7.0, priority=2), job(9.0, priority=0)):
        waiting.put(each)
    assert waiting.last().latest_start == 7.0
    assert Waiting().last() is None


def test_a_request_that_became_late_while_it_waited_can_still_be_withdrawn():
    waiting, one = Waiting(), job(1.0)
    waiting.put(one)
    waiting.candidates(5.0, 8)
    assert one.late
    waiting.take(one, served=False)
    assert waiting.candidates(5.0, 8) == []
