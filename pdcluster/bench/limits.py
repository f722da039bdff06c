"""The highest speed at which enough requests are in target: found by halving, on a grid of speeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ENOUGH = 0.9


@dataclass(frozen=True, slots=True)
class Range:
    """The speeds that are looked at: from `low` to `high`, `step` apart."""

    low: float
    high: float
    step: float


@dataclass(frozen=True, slots=True)
class Limit:
    """The highest speed with enough in target; None where already the lowest had too few.

    `open_end` says that the highest speed that was looked at still had enough: the limit lies beyond. `shares` are the
    shares in target by speed, as far as they were measured.
    """

    speed: float | None
    open_end: bool
    shares: Mapping[float, float]


def find_limit(share_at: Callable[[float], float], within: Range, known: Mapping[float, float] | None = None) -> Limit:
    """Halve the range until two neighbours differ in having enough; supposes that more load never helps.

    `known` are shares that were measured before: they narrow the range, and are not measured again.
    """
    shares = dict(known or {})
    last = round((within.high - within.low) / within.step)

    def speed_of(index: int) -> float:
        return round(within.low + index * within.step, 6)

    def has_enough(index: int) -> bool:
        speed = speed_of(index)
        if speed not in shares:
            shares[speed] = share_at(speed)
        return shares[speed] >= ENOUGH

    # Two ends that nobody measured yet: `good` is the highest known to have enough, `bad` the lowest known not to.
    good, bad = -1, last + 1
    for index in range(last + 1):
        share = shares.get(speed_of(index))
        if share is not None and share >= ENOUGH:
            good = max(good, index)
    for index in range(last, good, -1):
        share = shares.get(speed_of(index))
        if share is not None and share < ENOUGH:
            bad = index
    while bad - good > 1:
        middle = (good + bad) // 2
        if has_enough(middle):
            good = middle
        else:
            bad = middle
    return Limit(speed_of(good) if good >= 0 else None, good == last, dict(sorted(shares.items())))
