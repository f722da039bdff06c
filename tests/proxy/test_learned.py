"""Lines fitted online: what they learn, what they forget, what they say before they have seen anything."""

import itertools
import math
import random

import pytest

from proxy.scheduling.learned import Line, Lines

FIXED, EACH = 0.02, 0.0001
SIZES = (100, 800, 3000, 12_000, 50, 6000)


def guess():
    """A first guess that is far off."""
    return Line(0.5, 0.00001)


def taught(line, fixed, each, times, sizes=SIZES, noise=0.0, rng=None):
    rng = rng or random.Random(7)
    for size in itertools.islice(itertools.cycle(sizes), times):
        line.learn(size, (fixed + each * size) * (1 + noise * rng.uniform(-1, 1)))
    return line


@pytest.mark.parametrize("size", [0, 1, 100, 8192, 1_000_000])
def test_without_any_observation_the_guess_is_what_is_expected(size):
    line = guess()
    assert line.at(size) == pytest.approx(0.5 + 0.00001 * size)
    assert (line.seen, line.error) == (0, 0)


def test_slope_and_intercept_are_learned_from_a_wrong_guess():
    line = taught(guess(), FIXED, EACH, 200)
    assert line.fixed == pytest.approx(FIXED, rel=0.05)
    assert line.each == pytest.approx(EACH, rel=0.05)
    assert line.at(20_000) == pytest.approx(FIXED + EACH * 20_000, rel=0.05)
    assert line.error < 0.01


def test_some_observations_are_worth_more_than_the_guess():
    line = guess()
    expected = FIXED + EACH * 12_000
    assert abs(line.at(12_000) - expected) > 0.4 * expected
    taught(line, FIXED, EACH, 12)
    assert abs(line.at(12_000) - expected) < 0.1 * expected


def test_noise_is_averaged_out():
    line = taught(guess(), FIXED, EACH, 500, noise=0.3)
    assert line.at(3000) == pytest.approx(FIXED + EACH * 3000, rel=0.15)
    assert line.each == pytest.approx(EACH, rel=0.3)


def test_what_is_over_is_forgotten():
    line = taught(taught(guess(), FIXED, EACH, 300), 3 * FIXED, 3 * EACH, 150)
    for size in (100, 3000, 12_000):
        assert line.at(size) == pytest.approx(3 * (FIXED + EACH * size), rel=0.1)
    assert line.seen < 26  # the weight of what was seen has a limit, however much that is


def test_the_error_says_how_far_off_forecasts_are_and_falls_once_they_are_good():
    line = taught(guess(), FIXED, EACH, 200)
    settled = line.error
    taught(line, 3 * FIXED, 3 * EACH, 3)
    assert line.error > 5 * settled
    taught(line, 3 * FIXED, 3 * EACH, 300)
    assert line.error < 0.05 * (3 * FIXED + 3 * EACH * 12_000)


def test_one_wait_in_a_queue_is_not_taken_for_the_engines_speed():
    line, other = (taught(guess(), FIXED, EACH, 100) for _ in range(2))
    line.learn(3000, 3600.0)
    other.learn(3000, 8 * other.at(3000) + 1.0)
    assert line.at(3000) == other.at(3000) < 1.0


def test_sizes_that_are_all_the_same_still_give_a_forecast_that_grows_with_size():
    line = taught(guess(), FIXED, EACH, 400, sizes=(1000,))
    assert line.at(1000) == pytest.approx(FIXED + EACH * 1000, rel=0.05)
    assert line.each > 0
    assert line.at(500) < line.at(1000) < line.at(2000)


@pytest.mark.parametrize("size", [1, 1000])
def test_one_size_for_ever_leaves_a_sound_forecast(size):
    line = taught(guess(), FIXED, EACH, 20_000, sizes=(size,), noise=0.2)
    assert line.at(size) == pytest.approx(FIXED + EACH * size, rel=0.2)
    assert line.at(2 * size) <= 2.1 * line.at(size)


def test_work_that_gets_cheaper_with_size_is_no_reason_to_forecast_less_than_nothing():
    line = guess()
    for size, seconds in itertools.islice(itertools.cycle([(10, 1.0), (10_000, 0.1)]), 100):
        line.learn(size, seconds)
    assert line.each > 0
    assert line.fixed >= 0
    assert all(line.at(size) >= 0 for size in (0, 10, 1000, 1_000_000))


@pytest.mark.parametrize("sizes", [(0,), (0, 0, 1), (1,), (1e7, 1), (5, 5, 5, 6)], ids=str)
@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.5, 1e5])
def test_whatever_is_observed_forecasts_stay_finite_and_are_never_negative(sizes, seconds):
    line = guess()
    for size in itertools.islice(itertools.cycle(sizes), 200):
        line.learn(size, seconds)
        for asked in (0, 1, 8192, 1e7):
            assert math.isfinite(line.at(asked))
            assert line.at(asked) >= 0
    assert math.isfinite(line.error)


def test_work_of_no_size_for_ever_breaks_nothing():
    line = taught(guess(), FIXED, EACH, 20_000, sizes=(0,))
    assert all(math.isfinite(line.at(size)) and line.at(size) >= 0 for size in (0, 1, 10_000))


def test_an_endpoint_nobody_knows_is_held_to_be_like_its_pool():
    lines = Lines(0.5, 0.00001)
    assert lines.of("p0").at(1000) == pytest.approx(0.51)
    taught_by(lines, "p0", EACH, 200)
    assert lines.of("p1").at(3000) == pytest.approx(FIXED + EACH * 3000, rel=0.05)


def taught_by(lines, name, each, times):
    for size in itertools.islice(itertools.cycle(SIZES), times):
        lines.learn(name, size, FIXED + each * size)


def test_an_endpoints_own_line_counts_once_it_has_been_seen_often_enough():
    lines = Lines(FIXED, EACH)
    taught_by(lines, "slow", 10 * EACH, 2)
    assert lines.of("slow") is lines.of("unknown")
    taught_by(lines, "slow", 10 * EACH, 200)
    taught_by(lines, "fast", EACH, 200)
    assert lines.of("slow").at(3000) == pytest.approx(FIXED + 10 * EACH * 3000, rel=0.05)
    assert lines.of("fast").at(3000) == pytest.approx(FIXED + EACH * 3000, rel=0.05)


def test_an_endpoint_that_is_forgotten_is_like_its_pool_again_and_can_be_learned_anew():
    lines = Lines(FIXED, EACH)
    taught_by(lines, "p0", 10 * EACH, 50)
    taught_by(lines, "p1", EACH, 200)
    lines.forget("p0")
    assert lines.of("p0") is lines.of("unknown")
    assert lines.of("p0").at(3000) == pytest.approx(FIXED + EACH * 3000, rel=0.1)
    lines.forget("never seen")
    taught_by(lines, "p0", 2 * EACH, 100)
    assert lines.of("p0").at(3000) == pytest.approx(FIXED + 2 * EACH * 3000, rel=0.05)
