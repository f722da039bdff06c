"""The highest speed with enough in target is found with few runs, and says so where it lies outside."""

import pytest

from pdcluster.bench.limits import Range, find_limit


class Measured:
    def __init__(self, limit):
        self.limit = limit
        self.asked = []

    def __call__(self, speed):
        self.asked.append(speed)
        return 0.95 if speed <= self.limit + 1e-9 else 0.5


@pytest.mark.parametrize("limit", [2.0, 2.1, 3.7, 4.4, 6.8, 6.9])
def test_the_limit_is_found_by_halving(limit):
    measured = Measured(limit)
    found = find_limit(measured, Range(2.0, 7.0, 0.1))
    assert (found.speed, found.open_end) == (pytest.approx(limit), False)
    assert len(measured.asked) == len(set(measured.asked)) <= 6
    assert list(found.shares) == sorted(measured.asked)


def test_a_limit_outside_the_range_is_told_as_that():
    assert find_limit(Measured(1.0), Range(2.0, 3.0, 0.5)).speed is None
    beyond = find_limit(Measured(9.0), Range(2.0, 3.0, 0.5))
    assert (beyond.speed, beyond.open_end) == (3.0, True)


def test_what_is_known_is_not_measured_again():
    measured = Measured(4.2)
    found = find_limit(measured, Range(2.0, 7.0, 0.1), {4.0: 0.95, 4.5: 0.5, 9.0: 0.1})
    assert found.speed == pytest.approx(4.2)
    assert set(measured.asked) <= {4.1, 4.2, 4.3, 4.4}


def test_exactly_enough_is_enough():
    assert find_limit(lambda speed: 0.9, Range(1.0, 1.0, 0.1)).speed == 1.0
