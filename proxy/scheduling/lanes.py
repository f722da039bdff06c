"""Prefill engines as queues: what each works on, when it will have run dry, how long new work would take. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.scheduling.learned import Lines

# How long before it runs dry an engine is given its next prefill (seconds): the way there and back, and what forecasts
# are off by on the average, within bounds.
_AHEAD_S, _MOST_AHEAD_S = 0.01, 0.1
# An engine that is later than forecast is given this many at the most: it may be ill.
_OVERDUE_DEPTH = 2
# Small prefills are batched by engines: as many may be under way as fit into the time ahead, up to this.
_MOST_AT_ONCE = 64
_ROUNDING_S = 1e-6


@dataclass(slots=True)
class Work:
    """One prefill under way: when it was sent, how many tokens it computes, how long that should take."""

    sent: float
    tokens: float
    seconds: float


@dataclass(slots=True, eq=False)
class Lane:
    """One prefill engine. `number` is its place among all endpoints; `others` are seconds of work of other workers."""

    name: str
    number: int
    dry: float = 0.0  # when it will have nothing left to do
    replied: float = 0.0
    others: float = 0.0
    works: dict[int, Work] = field(default_factory=dict)  # by the id of the job

    def free(self, now: float, ahead: float) -> bool:
        """Tell whether it should be given work now."""
        if not self.works:
            return self.others <= ahead + _ROUNDING_S
        if self.dry <= now:
            return len(self.works) < _OVERDUE_DEPTH
        return self.dry + self.others - now <= ahead + _ROUNDING_S and len(self.works) < _MOST_AT_ONCE

    def starts(self, now: float) -> float:
        """Return when new work would begin. What is late already is expected to stay so for as long again."""
        if self.works and self.dry < now:
            return now + (now - self.dry) + max(work.seconds for work in self.works.values()) + self.others
        return max(now, self.dry) + self.others


class Lanes:
    """All prefill engines, and what has been learned of how fast they are."""

    def __init__(self, fixed: float = 0.005, each: float = 1 / 20_000) -> None:
        self.speed = Lines(fixed, each)
        self.by_name: dict[str, Lane] = {}
        self.by_number: dict[int, Lane] = {}

    def add(self, name: str, number: int) -> Lane:
        """Make an engine known."""
        lane = self.by_name[name] = self.by_number[number] = Lane(name, number)
        return lane

    def ahead(self, lane: Lane) -> float:
        """Return how long before it runs dry an engine is given its next prefill."""
        return min(_MOST_AHEAD_S, _AHEAD_S + self.speed.of(lane.name).error)

    def seconds(self, lane: Lane, tokens: float) -> float:
        """Return how long an engine would compute so many tokens."""
        return self.speed.of(lane.name).at(tokens)

    def begin(self, lane: Lane, job: int, tokens: float, now: float) -> None:
        """Note that a prefill was sent."""
        seconds = self.seconds(lane, tokens)
        lane.dry = max(now, lane.dry) + seconds
        lane.works[job] = Work(now, tokens, seconds)

    def end(self, lane: Lane, job: int, now: float, *, learn: bool) -> None:
        """Note that a prefill is over, well or not; what is left is forecast anew."""
        work = lane.works.pop(job, None)
        if work is None:
            return
        began = max(work.sent, lane.replied)
        if learn:
            self.speed.learn(lane.name, work.tokens, max(0.0, now - began))
            lane.replied = now
        lane.dry = now + sum(other.seconds for other in lane.works.values())
