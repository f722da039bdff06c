"""Late binding in virtual time: who is placed where and when, and what is learned from how it went."""

import random

import pytest

from proxy.scheduling.dispatcher import Dispatcher
from proxy.scheduling.job import Job, Targets
from proxy.scheduling.lanes import Lanes
from proxy.scheduling.prefix_index import PrefixIndex, chain
from proxy.scheduling.seats import Rooms


class Bench:
    """A dispatcher with so many engines; named p0.. and d0.."""

    def __init__(self, prefills=2, decodes=2, excluded=frozenset(), seats=None):
        rng = random.Random(3)
        lanes, rooms = Lanes(fixed=0.0, each=0.001), Rooms(rng)  # 1,000 tokens a second
        self.d = Dispatcher(lanes, rooms, PrefixIndex(), rng, Targets(), excluded)
        for number in range(prefills):
            lanes.add(f"p{number}", number)
        for number in range(decodes):
            rooms.add(f"d{number}", seats)
        self.d.ready_prefills = [f"p{number}" for number in range(prefills)]
        self.d.ready_decodes = [f"d{number}" for number in range(decodes)]

    def job(self, now=0.0, *, tokens=1000.0, wanted=100.0, text=None, **more):
        prompt = chain(text) if text else chain("")
        made = Job(arrived=now, tokens=tokens, deadline=now + wanted, prompt=prompt, **more)
        self.d.submit(made, now)
        return made

    def end(self, pair, now, pace=None):
        self.d.prefilled(pair, now)
        self.d.finished(pair.room, pair.job.output, now, pace)


def test_an_idle_engine_is_given_work_at_once_and_a_busy_one_none_until_it_is_about_to_run_dry():
    bench = Bench(prefills=1)
    bench.job()
    bench.job()
    (first,) = bench.d.due(0.0)
    assert bench.d.due(0.5) == []
    moment = bench.d.wake_at(0.5)
    assert 0.85 <= moment < 1.0
    (second,) = bench.d.due(moment)
    assert {first.job, second.job}
    assert bench.d.wake_at(moment) is None


def test_two_requests_go_to_two_engines():
    bench = Bench()
    bench.job()
    bench.job()
    assert {pair.lane.name for pair in bench.d.due(0.0)} == {"p0", "p1"}


def test_the_most_urgent_of_those_that_wait_goes_first():
    bench = Bench(prefills=1)
    bench.job(wanted=500.0)
    (running,) = bench.d.due(0.0)
    bench.job(wanted=90.0)
    urgent = bench.job(wanted=10.0)
    bench.d.prefilled(running, 1.0)
    (pair,) = bench.d.due(1.0)
    assert pair.job is urgent


def test_a_prompt_goes_where_its_beginning_is():
    bench = Bench(prefills=4)
    text = "once upon a time " * 1000
    bench.job(text=text, tokens=4000.0)
    (first,) = bench.d.due(0.0)
    bench.end(first, 4.0)
    for now in range(5, 15):
        bench.job(float(now), text=text + "and so on", tokens=4002.0)
        (pair,) = bench.d.due(float(now))
        assert pair.lane is first.lane
        assert pair.tokens < 500
        bench.end(pair, now + 0.1)


def test_a_request_waits_for_the_busy_engine_that_holds_its_prompt_where_that_is_sooner():
    bench = Bench(prefills=2)
    text = "a long story " * 2000
    bench.job(text=text, tokens=6000.0)
    (first,) = bench.d.due(0.0)
    bench.end(first, 6.0)
    bench.job(6.0, text=text, tokens=6000.0)
    (again,) = bench.d.due(6.0)
    assert again.lane is first.lane
    waits = bench.job(6.01, text=text + "more", tokens=6010.0)
    other = bench.job(6.01, tokens=10.0)
    assert {pair.job for pair in bench.d.due(6.01)} <= {waits, other}
    bench.d.prefilled(again, 6.1)
    bench.d.due(6.1)
    assert id(waits) in first.lane.works  # it went there, though the other engine was free


def test_an_engine_that_failed_a_request_is_not_given_it_again_while_there_is_another():
    bench = Bench(prefills=2, decodes=2)
    for _ in range(10):
        bench.job(avoid=frozenset({"p0", "d1"}))
        (pair,) = bench.d.due(0.0)
        assert (pair.lane.name, pair.room.name) == ("p1", "d0")
        bench.end(pair, 0.0)


def test_excluded_pairs_never_serve_together():
    bench = Bench(prefills=2, decodes=2, excluded=frozenset({("p0", "d0"), ("p1", "d1")}))
    for _ in range(20):
        bench.job()
        (pair,) = bench.d.due(0.0)
        assert (pair.lane.name, pair.room.name) in {("p0", "d1"), ("p1", "d0")}
        bench.end(pair, 0.0)


def test_no_prefill_begins_without_a_seat_on_decode():
    bench = Bench(prefills=4, decodes=1, seats=2)
    for _ in range(4):
        bench.job()
    first, second = bench.d.due(0.0)
    assert len(bench.d.waiting) == 2
    bench.end(first, 1.0)
    assert len(bench.d.due(1.0)) == 1
    assert second.room.taken == 2


def test_a_slow_prefill_engine_gets_less_than_a_third_of_an_equal_share():
    bench = Bench(prefills=4)
    counts, now, running = dict.fromkeys(bench.d.ready_prefills, 0), 0.0, []
    speeds = {name: 0.003 if name == "p0" else 0.001 for name in counts}
    for number in range(400):
        now = number * 0.5  # two a second; the quick three alone could serve three
        for pair in [pair for pair in running if pair.done <= now]:
            running.remove(pair)
            bench.end(pair.pair, pair.done)
        bench.job(now)
        for pair in bench.d.due(now):
            counts[pair.lane.name] += 1
            running.append(Running(pair, now + pair.tokens * speeds[pair.lane.name]))
    assert counts["p0"] < sum(counts.values()) / 4 / 3


class Running:
    def __init__(self, pair, done):
        self.pair, self.done = pair, done


def test_a_slow_decode_engine_gets_less_than_a_third_of_an_equal_share():
    bench = Bench(prefills=8, decodes=4)
    counts = dict.fromkeys(bench.d.ready_decodes, 0)
    running = []
    for number in range(400):
        bench.job(number * 0.1, tokens=1.0)
        for pair in bench.d.due(number * 0.1):
            counts[pair.room.name] += 1
            bench.d.prefilled(pair, number * 0.1)
            running.append(pair)
        if len(running) > 16:
            pair = running.pop(0)
            pace = 0.05 if pair.room.name == "d0" else 0.01
            bench.d.finished(pair.room, pair.job.output, number * 0.1, pace)
    assert counts["d0"] < sum(counts.values()) / 4 / 3


def test_equal_decode_engines_get_equal_shares():
    bench = Bench(prefills=8, decodes=4)
    counts = dict.fromkeys(bench.d.ready_decodes, 0)
    for number in range(400):
        bench.job(number * 1.0, tokens=1.0)
        (pair,) = bench.d.due(number * 1.0)
        counts[pair.room.name] += 1
        bench.end(pair, number * 1.0, pace=0.01)
    assert all(70 <= count <= 130 for count in counts.values()), counts


def test_a_request_that_left_is_never_placed():
    bench = Bench(prefills=1)
    bench.job()
    (pair,) = bench.d.due(0.0)
    gone = bench.job()
    bench.d.withdraw(gone)
    bench.d.prefilled(pair, 1.0)
    assert bench.d.due(1.0) == []


def test_the_tokens_of_a_character_are_learned_from_what_prefill_counted():
    bench = Bench()
    for _ in range(200):
        bench.job(text="x" * 1000, tokens=250.0)
        (pair,) = bench.d.due(0.0)
        bench.d.prefilled(pair, 0.0, prompt_tokens=500)
        bench.d.finished(pair.room, pair.job.output, 0.0)
    assert bench.d.tokens_per_character == pytest.approx(0.5, rel=0.01)


def test_an_engine_that_is_overdue_is_given_a_second_prefill_at_the_most_and_only_if_no_other_is_free():
    bench = Bench(prefills=2)
    bench.job()
    (stuck,) = bench.d.due(0.0)
    for number in range(5):
        now = 10.0 + number
        bench.job(now, tokens=10.0)
        (pair,) = bench.d.due(now)
        assert pair.lane is not stuck.lane
        bench.end(pair, now + 0.01)


def test_after_a_reply_that_was_late_the_rest_is_forecast_anew():
    bench = Bench(prefills=1)
    for _ in range(3):
        bench.job()
    (first,) = bench.d.due(0.0)
    (second,) = bench.d.due(bench.d.wake_at(0.5))
    bench.d.prefilled(first, 3.0)  # two seconds late, and the second one has only begun
    assert bench.d.due(3.1) == []
    assert list(first.lane.works) == [id(second.job)]
    assert first.lane.starts(3.1) == pytest.approx(4.0)


def test_what_is_late_already_is_expected_to_be_late_for_as_long_again():
    bench = Bench(prefills=1)
    bench.job()
    (pair,) = bench.d.due(0.0)
    assert pair.lane.starts(0.5) == pytest.approx(1.0)
    assert pair.lane.starts(5.0) == pytest.approx(5.0 + 4.0 + 1.0)
