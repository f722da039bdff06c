"""Virtual time: what a router hears and may decide, what a trace amounts to, and that a published trend comes out."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdcluster.errors import UserError
from pdcluster.replay.figures import Targets
from pdcluster.replay.trace import Arrival, Window, read_trace, shaped
from pdcluster.replay.trace import Shape as Pace
from pdcluster.simulation.profile import EngineProfile
from pdcluster.simulation.push import LeastWork, LeastWorkPrefix, RoundRobin
from pdcluster.simulation.report import overlaid, summarize, table, told
from pdcluster.simulation.router import NAMED, SimulationError, find_router
from pdcluster.simulation.virtual import Shape, Simulation

PUBLISHED = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl.gz"
PLAIN = EngineProfile()
STEP = 0.00825


class Told(RoundRobin):
    """Notes everything that it hears; decides what `then` says, by what was heard."""

    def __init__(self, cluster, then=None):
        super().__init__(cluster)
        self.heard, self.then = [], then or {}

    def arrive(self, now, request):
        self.heard.append(("arrive", now, request.number))
        return self.then.get("arrive", lambda number: super(Told, self).arrive(now, request))(request.number)

    def _hear(self, kind, now, number, *more):
        self.heard.append((kind, now, number, *more))
        return self.then.get(kind, lambda _: ())(number)

    def prefilled(self, now, number, cached_tokens):
        return self._hear("prefilled", now, number, cached_tokens)

    def first_token(self, now, number):
        return self._hear("first_token", now, number)

    def finished(self, now, number):
        return self._hear("finished", now, number)

    def failed(self, now, number, reason):
        return self._hear("failed", now, number, reason)

    def wake(self, now):
        return self._hear("wake", now, None)


def simulate(arrivals, then=None, *, router=None, prefill=1, decode=1, profile=PLAIN, **more):
    made = []

    def make(cluster):
        made.append(router(cluster) if router else Told(cluster, then))
        return made[0]

    simulation = Simulation(Shape(prefill, decode, profile, **more), make)
    return simulation.run(arrivals), made[0], simulation


def at(due, tokens=4000, output=10, blocks=()):
    return Arrival(due, tokens, output, tuple(blocks))


def test_a_request_is_prefilled_moved_and_decoded_and_the_router_hears_of_each():
    (outcome,), router, simulation = simulate([at(1.0)])
    begun = 1.0 + 0.1 + 0.02
    assert outcome.ttft == pytest.approx(0.12 + STEP)
    assert outcome.tpot == pytest.approx(STEP)
    assert [(name, when) for name, when, *_ in router.heard] == [
        ("arrive", 1.0),
        ("prefilled", pytest.approx(1.1)),
        ("first_token", pytest.approx(begun + STEP)),
        ("finished", pytest.approx(begun + 10 * STEP)),
    ]
    assert (outcome.error, outcome.prefill, outcome.decode) == ("", 0, 0)
    assert simulation.engines[0].kept == 0


def test_decode_alone_prefills_there():
    (outcome,), router, _ = simulate([at(0.0)], {"arrive": lambda number: [("alone", number, 0)]})
    assert outcome.ttft == pytest.approx(0.1)
    assert [name for name, *_ in router.heard] == ["arrive", "first_token", "finished"]


def test_a_refused_request_and_one_that_is_never_placed_are_no_answers():
    decisions = {0: [("refuse", 0)], 1: []}
    outcomes, _, simulation = simulate([at(0.0), at(0.1)], {"arrive": decisions.__getitem__})
    assert [outcome.error for outcome in outcomes] == ["refused", "unplaced"]
    summary = summarize(outcomes, Targets(), simulation.engines)
    assert (summary.in_target, summary.answered) == (0.0, 0)
    assert summary.not_answered == {"refused": 1, "unplaced": 1}
    assert "not answered: 1 refused, 1 unplaced" in told(summary)
    assert table(summary).row_count == 3


def test_the_router_is_woken_at_the_earliest_time_it_asked_for():
    then = {
        "arrive": lambda number: [("wake", 5.0), ("wake", 3.0), ("wake", 4.0)],
        "wake": lambda _: [("pair", 0, 0, 0)],
    }
    (outcome,), router, _ = simulate([at(1.0)], then)
    assert [entry[:2] for entry in router.heard if entry[0] == "wake"] == [("wake", 3.0)]
    assert outcome.ttft == pytest.approx(2.0 + 0.12 + STEP)
    assert outcome.sent == 3.0


def test_decode_may_be_decided_after_the_prefill():
    then = {
        "arrive": lambda number: [("prefill", number, 0)],
        "prefilled": lambda number: [("decode", number, 1)],
    }
    (outcome,), _, _ = simulate([at(0.0)], then, decode=2)
    assert (outcome.decode, outcome.ttft) == (1, pytest.approx(0.12 + STEP))


def test_a_decode_decided_before_the_prefill_ends_waits_for_it():
    then = {"arrive": lambda number: [("prefill", number, 0), ("decode", number, 0)]}
    (outcome,), _, _ = simulate([at(0.0)], then)
    assert outcome.ttft == pytest.approx(0.12 + STEP)


def test_a_decode_after_the_lease_fails_and_may_be_prefilled_again():
    then = {
        "arrive": lambda number: [("prefill", number, 0), ("wake", 40.0)],
        "wake": lambda _: [("decode", 0, 0)],
    }
    (lost,), router, simulation = simulate([at(0.0)], then)
    assert (lost.error, simulation.engines[0].counts.expired) == ("lease", 1)
    assert ("failed", 40.0, 0, "lease") in router.heard
    (again,), _, _ = simulate([at(0.0)], then | {"failed": lambda number: [("pair", number, 0, 0)]})
    assert (again.error, again.ttft) == ("", pytest.approx(40.0 + 0.12 + STEP))


def test_a_prompt_that_no_engine_takes_fails():
    (outcome,), router, _ = simulate([at(0.0, tokens=200_000)])
    assert outcome.error == "too_long"
    assert router.heard[-1] == ("failed", 0.0, 0, "too_long")


@pytest.mark.parametrize(
    "decision",
    [
        ("pair", 7, 0, 0),
        ("pair", 0, 1, 0),
        ("pair", 0, 0, -1),
        ("alone", 0, 1),
        ("decode", 0, 0),
        ("decode", 3, 0),
        ("nonsense",),
        ("pair", 0),
    ],
)
def test_what_cannot_be_done_is_the_routers_error(decision):
    with pytest.raises(SimulationError, match="the router decided"):
        simulate([at(0.0)], {"arrive": lambda _: [decision]})


@pytest.mark.parametrize("second", [("pair", 0, 0, 0), ("alone", 0, 0), ("refuse", 0)])
def test_a_request_that_runs_cannot_be_placed_again(second):
    with pytest.raises(SimulationError, match="runs or is over"):
        simulate([at(0.0)], {"arrive": lambda number: [("pair", number, 0, 0), second]})


def test_cached_prefixes_are_told_and_shorten_prefill():
    outcomes, router, _ = simulate([at(0.0, 1024, blocks=(5, 6)), at(1.0, 1100, blocks=(5, 6, 7))])
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 1024]
    assert [entry[3] for entry in router.heard if entry[0] == "prefilled"] == [0, 1024]
    assert outcomes[1].prefilled == pytest.approx(1.0 + 76 / 40_000)


def test_a_router_that_wants_kv_events_hears_what_engines_hold():
    class Listening(RoundRobin):
        def __init__(self, cluster):
            super().__init__(cluster)
            self.held, self.parents = {}, {}

        def blocks(self, now, role, index, stored, removed):
            held = self.held.setdefault((role, index), set())
            for parent, hashes in stored:
                self.parents |= dict(zip(hashes, (parent, *hashes[:-1]), strict=True))
                held.update(hashes)
            held.difference_update(removed)

    arrivals = [at(0.1 * index, 1024, blocks=(10 * index, 10 * index + 1)) for index in range(5)]
    profile = replace(PLAIN, cache_blocks=4)
    _, router, _ = simulate(arrivals, router=Listening, profile=profile)
    # The beginning of a prompt is evicted last; the newest two are held whole.
    assert router.held["prefill", 0] == {30, 31, 40, 41}
    assert router.parents[41] == 40
    assert router.parents[40] is None


def test_a_router_sees_load_as_metrics_would_tell_it():
    seen = []

    class Looking(RoundRobin):
        def arrive(self, now, request):
            seen.append(self._cluster.load("prefill", 0))
            return super().arrive(now, request)

    simulate([at(0.0), at(0.01), at(0.02)], router=Looking)
    assert [(load.running, load.waiting) for load in seen] == [(0, 0), (1, 0), (1, 1)]


def test_a_slower_engine_is_slower():
    arrivals = [at(0.0, output=20), at(0.0, output=20)]
    outcomes, *_ = simulate(arrivals, prefill=2, decode=2, slow={("decode", 1): 5.0, ("prefill", 0): 3.0})
    assert outcomes[0].prefilled == pytest.approx(3 * outcomes[1].prefilled)
    assert outcomes[1].tpot == pytest.approx(5 * outcomes[0].tpot)


def test_copies_share_no_blocks_and_keep_order():
    arrivals = [at(0.0, 1024, blocks=(1, 2)), at(5.0, 1024, blocks=(1, 3))]
    made = overlaid(arrivals, 3, 10.0)
    assert [arrival.due for arrival in made] == sorted(arrival.due for arrival in made)
    assert len({block for arrival in made for block in arrival.blocks}) == 9
    assert overlaid(arrivals, 1, 10.0) == arrivals


def test_least_work_places_by_tokens_and_returns_what_it_took():
    arrivals = [at(0.0, 8000), at(0.001, 100), at(0.002, 100), at(0.003, 100)]
    outcomes, router, _ = simulate(arrivals, router=LeastWork, prefill=2, decode=2)
    assert [outcome.prefill for outcome in outcomes] == [0, 1, 1, 1]
    assert router._tokens == [0, 0]
    assert router._requests == [0, 0]
    alone, *_ = simulate(arrivals, router=LeastWork, prefill=0, decode=2)
    assert [outcome.decode for outcome in alone] == [0, 1, 0, 1]


def test_least_work_and_prefix_follows_a_prefix_until_work_outweighs_it():
    blocks = tuple(range(8))
    arrivals = [at(0.0, 100), at(0.001, 4096, blocks=blocks), at(1.0, 4096, blocks=blocks)]
    outcomes, *_ = simulate(arrivals, router=LeastWorkPrefix, prefill=2)
    assert outcomes[2].prefill == outcomes[1].prefill == 1
    assert outcomes[2].cached_tokens == 4095


def test_routers_are_found_by_name_and_by_module(tmp_path, monkeypatch):
    assert find_router("round_robin") is RoundRobin
    (tmp_path / "mine_router.py").write_text("class Mine: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_router("mine_router:Mine").__name__ == "Mine"
    sys.modules.pop("mine_router")
    for name, told_ in (("best", "there is round_robin"), ("mine_router:Other", "no class"), ("no.such:X", "import")):
        with pytest.raises(UserError, match=told_):
            find_router(name)


@pytest.mark.parametrize("name", NAMED)
def test_every_request_ends_under_each_router_and_runs_repeat(name):
    def run():
        rng = random.Random(5)
        arrivals = [
            at(0.03 * index, rng.randrange(1, 9000), rng.randrange(1, 60), tuple(rng.choices(range(50), k=18)))
            for index in range(200)
        ]
        outcomes, _, simulation = simulate(arrivals, router=find_router(name), prefill=3, decode=2)
        assert not [outcome.error for outcome in outcomes if outcome.error]
        assert all(engine.kept == engine.running == engine.waiting == 0 for engine in simulation.engines)
        return [(outcome.first, outcome.done) for outcome in outcomes]

    assert run() == run()


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the published trace beside the repository")
@pytest.mark.parametrize(("speed", "expected"), [(3.0, 0.81), (4.0, 0.53), (4.5, 0.26), (5.0, 0.14)])
def test_push_round_robin_loses_its_targets_as_load_rises_as_was_published(speed, expected):
    """The first column of the table in the issue that asked for the simulator: seconds 600 to 960, four prefills."""
    trace = read_trace(PUBLISHED, Window(600, 960))
    schedule = shaped(trace, Pace(speed=speed, max_output=200))
    outcomes, _, simulation = simulate(schedule.arrivals, router=RoundRobin, prefill=4, decode=8)
    summary = summarize(outcomes, Targets(), simulation.engines)
    assert summary.in_target == pytest.approx(expected, abs=0.06)
    assert summary.tpot_in_target == 1.0
