"""The engine in time: what a request costs alone, what it costs others, and who waits for memory."""

import itertools
import random
from dataclasses import replace

import pytest

from pdcluster.simulation.engine import Engine
from pdcluster.simulation.job import Job, Told, Work
from pdcluster.simulation.profile import EngineProfile

PLAIN = EngineProfile()
FIRST, TOKEN, DONE, PULLED, EXPIRED = Told.FIRST, Told.TOKEN, Told.DONE, Told.PULLED, Told.EXPIRED


def run(engine, *submissions, until=1e9):
    """Give jobs to an engine at their times; return what was told as {(name, told): [times]}."""
    told = {}

    def note(events):
        for event in events:
            told.setdefault((event.job.name, event.told), []).append(event.at)

    for now, job in sorted(submissions, key=lambda item: item[0]):
        while engine.next_event() <= now:
            note(engine.advance(engine.next_event()))
        assert engine.submit(now, job)
    while engine.next_event() < until:
        note(engine.advance(engine.next_event()))
    return told


def job(name, prompt, output=1, work=Work.WHOLE, hashes=()):
    return Job(name, prompt, output, tuple(hashes), work)


def prefill(name, prompt, hashes=()):
    return job(name, prompt, 1, Work.PREFILL, hashes)


def pull(name, prompt, output, hashes=()):
    return job(name, prompt, output, Work.PULL, hashes)


def test_prefills_go_one_at_a_time_at_the_profiles_speed():
    told = run(Engine(PLAIN), (0.0, prefill("a", 4000)), (0.01, prefill("b", 2000)))
    assert told["a", DONE] == [pytest.approx(0.1)]
    assert told["b", DONE] == [pytest.approx(0.15)]


def test_a_prefix_that_was_seen_is_not_computed_again_but_for_one_token():
    engine = Engine(PLAIN)
    first, again = prefill("a", 1024, (1, 2)), prefill("b", 1024, (1, 2))
    told = run(engine, (0.0, first), (1.0, again))
    assert told["a", DONE] == [pytest.approx(1024 / 40_000)]
    assert told["b", DONE] == [pytest.approx(1.0 + 1 / 40_000)]
    assert (first.cached, again.cached) == (0, 1023)
    assert (engine.counts.prompt_tokens, engine.counts.cached_tokens) == (2048, 1023)


def test_a_fetched_request_decodes_in_steps_after_its_transfer():
    told = run(Engine(PLAIN), (0.0, pull("a", 2000, 3)))
    assert told["a", PULLED] == [pytest.approx(0.01)]
    step = 0.008 + 0.00025
    assert told["a", FIRST] == [pytest.approx(0.01 + step)]
    assert told["a", DONE] == [pytest.approx(0.01 + 3 * step)]


def test_who_comes_during_a_step_joins_the_next_one():
    alone, both = 0.00825, 0.0085
    told = run(Engine(PLAIN), (0.0, pull("a", 1, 10)), (0.01, pull("b", 1, 2)))
    started = 5e-6
    assert told["b", FIRST] == [pytest.approx(started + 2 * alone + both)]
    assert told["b", DONE] == [pytest.approx(started + 2 * alone + 2 * both)]
    assert told["a", DONE] == [pytest.approx(started + 8 * alone + 2 * both)]


def test_a_local_prefill_stalls_the_batch_beside_it():
    told = run(Engine(PLAIN, every_step=True), (0.0, pull("a", 1, 6)), (0.01, job("b", 4000, 2)))
    times = told["a", FIRST] + told["a", TOKEN]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) == pytest.approx(0.1 + 0.00825)
    assert sorted(gaps)[-2] == pytest.approx(0.0085)


def test_chunks_stall_the_batch_less_and_the_prefill_takes_longer():
    chunked = replace(PLAIN, chunk_tokens=512)
    told = run(Engine(chunked, every_step=True), (0.0, pull("a", 1, 60)), (0.01, job("b", 4000, 2)))
    times = told["a", FIRST] + told["a", TOKEN]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) == pytest.approx(511 / 40_000 + 0.00825)
    # 511 tokens a step beside one sequence: eight steps, begun when the step under way is over.
    assert told["b", FIRST] == [pytest.approx(5e-6 + 2 * 0.00825 + 0.1 + 8 * 0.00825)]


def test_prompts_share_a_step_where_prefill_is_batched():
    batched = replace(PLAIN, chunk_tokens=8192, prefill_batch=8)
    told = run(Engine(batched), (0.0, prefill("a", 100)), (0.001, prefill("b", 1000)), (0.001, prefill("c", 3000)))
    assert told["b", DONE] == told["c", DONE] == [pytest.approx(0.0025 + 0.1)]


def test_long_contexts_cost_what_the_profile_says():
    profile = replace(PLAIN, prefill_pair_s=1e-9, decode_token_s=1e-6, prefill_base_s=0.002)
    told = run(Engine(profile), (0.0, job("a", 4000, 3)))
    first = 0.002 + 0.1 + 1e-9 * 4000 * 2000
    assert told["a", FIRST] == [pytest.approx(first)]
    assert told["a", DONE] == [pytest.approx(first + 2 * 0.00825 + 1e-6 * (4000 + 4001))]


def test_nobody_gets_a_seat_beyond_the_limit():
    narrow = replace(PLAIN, max_num_seqs=2)
    engine = Engine(narrow)
    told = run(engine, *[(0.0, pull(index, 1, 10)) for index in range(4)])
    done = [told[index, DONE][0] for index in range(4)]
    assert done == sorted(done)
    assert told[2, FIRST][0] > done[0]
    assert told[3, FIRST][0] > done[1]


def test_kv_that_nobody_fetches_is_freed_when_its_lease_ends():
    engine = Engine(replace(PLAIN, kv_blocks=8))
    told = run(engine, (0.0, prefill("a", 4096, range(8))), (1.0, prefill("b", 4096, range(10, 18))))
    assert told["a", EXPIRED] == [pytest.approx(0.1024 + 30)]
    assert told["b", DONE] == [pytest.approx(0.1024 + 30 + 0.1024)]
    assert engine.counts.expired == 2
    assert not engine.claim("a")


def test_a_claim_stops_the_lease_and_a_release_makes_room():
    engine = Engine(replace(PLAIN, kv_blocks=8))
    engine.submit(0.0, prefill("a", 4096))
    engine.advance(1.0)
    engine.submit(1.0, prefill("b", 4096))
    assert engine.claim("a")
    assert engine.next_event() == float("inf")
    assert (engine.kept, engine.waiting, engine.kv_usage) == (1, 1, 1.0)
    engine.release(50.0, "a")
    assert engine.next_event() == pytest.approx(50.1024)
    assert not engine.claim("a")


def test_the_youngest_is_preempted_where_memory_runs_out_and_all_end_with_every_token():
    # Two of 6 blocks and 200 tokens to make: 12 blocks at first, 14 when both have grown by one.
    profile = replace(PLAIN, kv_blocks=13)
    engine = Engine(profile, every_step=True)
    told = run(engine, (0.0, pull("a", 3000, 200)), (0.0, pull("b", 3000, 200)))
    assert engine.counts.preempted == 1
    assert [len(told[name, TOKEN]) for name in "ab"] == [199, 199]
    assert told["b", DONE] > told["a", DONE]
    assert (engine.cache.used, engine.running, engine.waiting) == (0, 0, 0)


def test_what_can_never_fit_is_refused():
    engine = Engine(replace(PLAIN, kv_blocks=4, max_model_len=4000))
    assert not engine.submit(0.0, job("a", 3999, 2))
    assert not engine.submit(0.0, job("b", 2040, 10))
    assert engine.submit(0.0, job("c", 2039, 10))


@pytest.mark.parametrize("moment", [0.0, 0.002, 0.02, 0.5])
def test_a_client_that_leaves_gives_everything_back_whatever_state_it_is_in(moment):
    profile = replace(PLAIN, kv_blocks=40, max_num_seqs=1)
    engine = Engine(profile)
    left, other = pull("left", 2000, 100), pull("other", 2000, 3)
    engine.submit(0.0, left)
    engine.submit(0.0, other)
    engine.advance(moment)
    engine.cancel(moment, left)
    told = run(engine)
    assert ("left", DONE) not in told
    assert (engine.cache.used, engine.running, engine.waiting) == (0, 0, 0)
    assert ("other", DONE) in told


def test_a_client_that_leaves_while_it_waits_or_prefills_is_forgotten():
    engine = Engine(PLAIN)
    first, second = job("a", 4000, 5), job("b", 4000, 5)
    engine.submit(0.0, first)
    engine.submit(0.0, second)
    engine.cancel(0.01, second)
    engine.cancel(0.02, first)
    assert run(engine) == {}
    assert (engine.cache.used, engine.waiting, engine.running) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_leaps_make_the_same_times_as_single_steps(seed):
    profile = replace(
        PLAIN,
        chunk_tokens=1024,
        prefill_batch=4,
        decode_token_s=2e-8,
        max_num_seqs=12,
        kv_blocks=60,
        cache_blocks=None,
        block_tokens=64,
    )

    def jobs():
        made = random.Random(seed + 100)
        at = 0.0
        for name in range(60):
            at += made.expovariate(20.0)
            prompt = made.randrange(1, 1500)
            family = made.randrange(20)
            hashes = tuple(family * 1000 + index for index in range(prompt // 64))
            work = made.choice((Work.WHOLE, Work.PULL))
            yield at, Job(name, prompt, made.randrange(1, 150), hashes, work)

    leaping, stepping = Engine(profile), Engine(profile, every_step=True)
    told, slow = run(leaping, *jobs()), run(stepping, *jobs())
    for key, times in told.items():
        if key[1] in (FIRST, DONE, PULLED):
            assert times == pytest.approx(slow[key]), key
    assert leaping.counts.preempted == stepping.counts.preempted > 0
    assert leaping.counts.generated_tokens == stepping.counts.generated_tokens
    assert leaping.cache.used == stepping.cache.used == 0


def test_a_slower_engine_takes_so_many_times_as_long():
    quick = run(Engine(PLAIN), (0.0, job("a", 4000, 20)))["a", DONE][0]
    slow = run(Engine(PLAIN.slowed(3.0)), (0.0, job("a", 4000, 20)))["a", DONE][0]
    assert slow == pytest.approx(3 * quick)
