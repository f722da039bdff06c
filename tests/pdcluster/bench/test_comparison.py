"""Trials side by side: what is averaged, who is the best peer, and what a slow engine did to the rest."""

import json

import pytest

from pdcluster.bench.comparison import LimitRow, beside_peers, find_limits, make_rows, make_slow_rows, run_grid
from pdcluster.bench.comparison_report import Comparison, tables, to_json, warnings
from pdcluster.bench.contestants import Contestant, find_contestants
from pdcluster.bench.limits import Limit, Range
from pdcluster.bench.routers import Ports
from pdcluster.bench.simulated import Served, Slow
from pdcluster.bench.trials import Case, Setting, Trial, Trials, shuffled, without_slowest
from pdcluster.errors import UserError
from pdcluster.replay.driver import Record, Run
from pdcluster.replay.figures import Targets, make_figures
from pdcluster.replay.trace import Shape, Trace, Window

SLOW = Slow("decode", 5.0)


def record(ttft=0.1, tpot=0.01, error=""):
    return Record(0.0, 0.0, ttft, ttft + 10 * tpot, ttft + 10 * tpot, 100, 11, 11, None, None, 200, error, "")


def trial(name="ours", speed=3.0, seed=1, share=1.0, *, ttft=0.2, slow=None, **more):
    """Make a trial of a hundred requests, this share of them in target."""
    late = round(100 * (1 - share))
    records = [record(ttft)] * (100 - late) + [record(9.0)] * late
    figures = make_figures(Run(tuple(records), 10.0, 1.0, 5), Targets())
    made = {
        "served": Served((50, 50), (10, 45, 45), 0.3),
        "router_us": 100.0,
        "router_mb": 50.0,
        "engines_core": 0.2,
        "others_cores": 0.0,
        "rest": None,
        "conditions": {"model": "m"},
    }
    return Trial(Case(name, speed, seed, slow), name.startswith("ours"), figures, **(made | more))


def test_rows_average_seeds_and_ours_is_compared_with_the_best_peer_of_that_speed():
    done = [
        *(trial("ours", seed=seed, share=share) for seed, share in ((1, 0.99), (2, 0.97))),
        *(trial("worse", seed=seed, share=0.5) for seed in (1, 2)),
        *(trial("better", seed=seed, share=0.7) for seed in (1, 2)),
        trial("better", speed=4.0, share=0.6),
    ]
    rows = make_rows(done)
    ours = rows[0]
    assert [(row.speed, row.contestant, row.seeds) for row in rows] == [
        (3.0, "ours", 2),
        (3.0, "worse", 2),
        (3.0, "better", 2),
        (4.0, "better", 1),
    ]
    assert (ours.in_target, ours.in_target_range) == (pytest.approx(0.98), (0.97, 0.99))
    assert ours.share_to_peer == pytest.approx(0.98 / 0.7)
    assert ours.ttft_p99_to_peer == pytest.approx(4.6 / 9.0)  # the median of 0.2 (seed 1) and 9 s (seed 2)
    assert {row.share_to_peer for row in rows[1:]} == {None}
    assert ours.cached_share == 0.3


def test_without_a_peer_there_is_no_ratio():
    assert make_rows([trial()])[0].share_to_peer is None


def test_a_slow_engines_share_and_the_rest_are_set_beside_the_run_without_one():
    rest = make_figures(Run(tuple([record(tpot=0.02)] * 90), 10.0, 1.0, 5), Targets())
    (row,) = make_slow_rows([trial(), trial(slow=SLOW, rest=rest)])
    assert (row.slow, row.seeds, row.part_of_equal_share) == ("decode:5", 1, pytest.approx(0.3))
    assert (row.rest_p99, row.healthy_p99) == (pytest.approx(0.02), pytest.approx(0.01))
    assert row.ratio == pytest.approx(2.0)
    assert make_rows([trial(slow=SLOW, rest=rest)]) == []


def test_the_slowest_requests_are_taken_for_those_of_the_slow_engine():
    records = tuple(record(tpot=pace / 100) for pace in (9, 1, 8, 2, 3))
    served = Served((5,), (2, 1, 2), None)
    assert [item.tpot for item in without_slowest(records, SLOW, served)] == pytest.approx([0.01, 0.02, 0.03])
    assert without_slowest(records, Slow("prefill", 3), Served((9, 1), (1,), None)) == ()


def test_a_seed_chooses_the_order_in_which_a_router_is_told_its_engines():
    ports = Ports(tuple(range(4)), tuple(range(10, 18)), 0)
    orders = [shuffled(ports, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2].prefill) == list(ports.prefill)
    assert sorted(orders[2].decode) == list(ports.decode)


def test_limits_use_what_the_grid_measured_and_are_compared_with_the_best_peer(monkeypatch):
    ran = []

    def run(setting, contestant, case, say):
        ran.append(case)
        limit = {"ours": 5.0, "peer": 4.0, "hopeless": 0.0}[contestant.name]
        return trial(contestant.name, case.speed, case.seed, 1.0 if case.speed <= limit else 0.5)

    monkeypatch.setattr("pdcluster.bench.trials.run_trial", run)
    kept = []
    trials = Trials(None, print, kept.append)
    contestants = [Contestant(name, name == "ours", None, "1") for name in ("ours", "peer", "hopeless")]
    run_grid(trials, contestants, [4.0], [1, 2])
    assert [case.contestant for case in ran] == ["ours", "peer", "hopeless"] * 2
    rows = find_limits(trials, contestants, [1, 2], Range(3.0, 6.0, 0.5), lambda text: None)
    assert [(row.limit.speed, row.to_peer) for row in rows] == [(5.0, 1.25), (4.0, None), (None, None)]
    assert len(ran) == len(set(ran)) == len(kept)
    assert not [case for case in ran if case.contestant == "ours" and case.speed < 4]


def test_a_seed_that_is_clear_of_enough_decides_alone(monkeypatch):
    ran = []

    def run(setting, contestant, case, say):
        ran.append((case.speed, case.seed))
        return trial(share={1.0: 1.0, 2.0: 0.92, 3.0: 0.5}[case.speed])

    monkeypatch.setattr("pdcluster.bench.trials.run_trial", run)
    ours = Contestant("ours", True, None, "1")
    (row,) = find_limits(Trials(None, print, print), [ours], [1, 2, 3], Range(1.0, 3.0, 1.0), lambda text: None)
    assert (row.limit.speed, row.limit.shares) == (2.0, {2.0: pytest.approx(0.92), 3.0: 0.5})
    assert ran == [(2.0, 1), (2.0, 2), (2.0, 3), (3.0, 1)]


def test_without_a_peers_limit_there_is_no_ratio():
    rows = [LimitRow("ours", True, Limit(5.0, False, {})), LimitRow("peer", False, Limit(None, False, {}))]
    assert beside_peers(rows) == rows


def test_what_is_shown_and_what_is_written_hold_the_conditions(tmp_path):
    setting = Setting(Trace("t", Window(), (), 0), Shape(), Targets(), tmp_path / "engines.py", 4, 8)
    rest = make_figures(Run((record(),), 1.0, 1.0, 1), Targets())
    done = (trial(), trial("peer"), trial(slow=SLOW, rest=rest), trial("peer", slow=SLOW, rest=rest))
    found = Comparison(setting, done, (LimitRow("ours", True, Limit(5.0, True, {5.0: 0.93})),))
    assert [len(shown.columns) for shown in tables(found)] == [12, 4, 9]
    told = json.loads(json.dumps(to_json(found)))
    assert told["conditions"]["engines"] == "4 prefill and 8 decode, engines.py"
    assert told["trials"][0]["conditions"] == {"model": "m"}
    assert "engines" in told["conditions"]["seed_changes"]
    assert tables(Comparison(setting, ())) == []


def test_a_machine_that_was_too_busy_is_told():
    late = make_figures(Run((Record(0, 0.3, 1, 1, 1, 1, 1, 1, None, None, 200, "", ""),), 1.0, 1.0, 1), Targets())
    assert warnings([trial()]) == []
    assert "took 90% of a core" in warnings([trial(engines_core=0.9)])[0]
    assert "other programs took 1.5 cores" in warnings([trial(others_cores=1.5)])[0]
    slow = trial()
    assert "300 ms late" in warnings([Trial(slow.case, True, late, slow.served, 1, 1, 0, 0, None, {})])[0]


def test_each_of_our_policies_is_a_contestant_and_unknown_peers_are_refused():
    made = find_contestants(["auto", "prefix"], ["--workers", "2"], [])
    assert [(item.name, item.ours) for item in made] == [("pdcluster auto", True), ("pdcluster prefix", True)]
    assert made[0].version == "pdcluster proxy --policy auto --workers 2"
    assert [item.name for item in find_contestants([], [], [])] == ["pdcluster"]
    with pytest.raises(UserError, match="--peers fastest: vllm-router has round_robin, power_of_two, cache_aware"):
        find_contestants([], [], ["fastest"])
