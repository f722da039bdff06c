"""What engines turned out to cost: straight lines fitted as answers come, old ones forgotten little by little. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

# What an observation still counts for when the next one comes.
_KEPT = 0.96
# Observations after which an endpoint's own line is believed rather than its pool's.
_ENOUGH = 3.0
# An observation that is this many times what was expected says something of a queue, not of the engine.
_OUTLIER = 8.0
_SMALLEST = 1e-9


@dataclass(slots=True)
class Line:
    """Seconds = fixed + each * size, by least squares over what was seen; begins with a guess that soon counts little.

    `seen` is the weight of what was observed; `error` is the mean distance between forecast and truth, in seconds.
    """

    fixed: float
    each: float
    reach: float = 8192.0  # a size at which the guess is held to be good
    seen: float = 0.0
    error: float = 0.0
    _sums: list[float] = field(init=False, repr=False)  # of weights, x, y, x*x, x*y

    def __post_init__(self) -> None:
        self._sums = [0.0] * 5
        self._put(0.0, self.fixed, 0.5)
        self._put(self.reach, self.fixed + self.each * self.reach, 0.5)

    def at(self, size: float) -> float:
        """Return the seconds that are expected for a size."""
        return self.fixed + self.each * size

    def learn(self, size: float, seconds: float) -> None:
        """Take what one piece of work took."""
        expected = self.at(size)
        if self.seen > _ENOUGH and seconds > _OUTLIER * expected + 1.0:
            seconds = _OUTLIER * expected + 1.0
        self.error += 0.1 * (abs(seconds - expected) - self.error)
        self._sums = [value * _KEPT for value in self._sums]
        self.seen = self.seen * _KEPT + 1.0
        self._put(size, seconds, 1.0)
        self._solve()

    def _put(self, size: float, seconds: float, weight: float) -> None:
        sums = self._sums
        sums[0] += weight
        sums[1] += weight * size
        sums[2] += weight * seconds
        sums[3] += weight * size * size
        sums[4] += weight * size * seconds

    def _solve(self) -> None:
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        each = (weight * xy - x * y) / spread if spread > _SMALLEST * xx else 0.0
        fixed = (y - each * x) / weight
        if each <= 0.0 or fixed < 0.0:  # sizes too much alike to tell the two apart
            fixed, each = 0.0, max(_SMALLEST, y / max(x, 1.0))
        self.fixed, self.each = fixed, each


class Lines:
    """One line for each endpoint of a pool, and one of the whole pool for those that are not known yet."""

    def __init__(self, fixed: float, each: float) -> None:
        self.pool = Line(fixed, each)
        self._own: dict[str, Line] = {}

    def of(self, name: str) -> Line:
        """Return the line that is believed for an endpoint."""
        own = self._own.get(name)
        return own if own is not None and own.seen >= _ENOUGH else self.pool

    def learn(self, name: str, size: float, seconds: float) -> None:
        """Take what one piece of work took an endpoint."""
        own = self._own.get(name)
        if own is None:
            own = self._own[name] = Line(self.pool.fixed, self.pool.each)
        own.learn(size, seconds)
        self.pool.learn(size, seconds)

    def forget(self, name: str) -> None:
        """Forget an endpoint: it was restarted, or is another machine."""
        self._own.pop(name, None)
