"""Late binding: requests wait here, not in engines, and are placed when an engine is about to run dry. Pure.

The clock's time is passed in, nothing is called back: whoever drives this (the proxy, the simulator) tells what
happened and asks for the placements that are due.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from proxy.scheduling.job import Job, Targets
from proxy.scheduling.lanes import Lane, Lanes
from proxy.scheduling.learned import Line
from proxy.scheduling.prefix_index import PrefixIndex
from proxy.scheduling.seats import Room, Rooms
from proxy.scheduling.waiting import Waiting

# So many of the most urgent requests are compared when an engine becomes free, and so many engines for each of them.
_COMPARED = 8
_ENGINES = 12
# A second of computing that a better placed engine would have saved costs others this many seconds of waiting.
_WASTE = 1.0
# When to look again at the soonest, and at an engine that is later than forecast (seconds).
_SOON_S, _LATER_S = 0.001, 0.05
# Prompts of at least so many characters tell how many tokens a character is; each changes the mean by this share.
_TELLING, _NEWS = 200, 0.05


@dataclass(frozen=True, slots=True)
class Pair:
    """A placement that is due now. `tokens` are those that prefill has to compute, as forecast."""

    job: Job
    lane: Lane
    room: Room
    tokens: float


class Dispatcher:
    """Places requests on pairs of ready engines; `excluded` are the pairs, by name, that must not serve together."""

    def __init__(
        self,
        lanes: Lanes,
        rooms: Rooms,
        index: PrefixIndex,
        rng: random.Random,
        targets: Targets,
        excluded: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        self.lanes = lanes
        self.rooms = rooms
        self.index = index
        self.targets = targets
        self.waiting = Waiting()
        self.tokens_per_character = 0.25
        self.to_first = Line(0.01, 5e-6)  # seconds from prefill's reply to the first token, by prompt tokens
        self.ready_prefills: list[str] = []
        self.ready_decodes: list[str] = []
        self._excluded = excluded
        self._rng = rng

    # What is asked.

    def submit(self, job: Job, now: float) -> None:
        """Let a request wait for its engines; `due` says when it has them."""
        job.latest_start = job.deadline - self.to_first.at(job.tokens) - self._least_seconds(job)
        job.late = job.latest_start < now
        self.waiting.put(job)

    def due(self, now: float) -> list[Pair]:
        """Return the placements that are due. Each is counted as begun."""
        pairs: list[Pair] = []
        while self.waiting:
            pair = self._next(now)
            if pair is None:
                break
            self.waiting.take(pair.job)
            self.lanes.begin(pair.lane, id(pair.job), pair.tokens, now)
            self.rooms.enter(pair.room, pair.job.output)
            if pair.job.prompt.keys:
                self.index.record(pair.lane.number, pair.job.prompt)
            pairs.append(pair)
        return pairs

    def wake_at(self, now: float) -> float | None:
        """Return when to ask again though nothing happened, None where only an event can help."""
        if not self.waiting:
            return None
        moment = float("inf")
        for name in self.ready_prefills:
            lane = self.lanes.by_name[name]
            if lane.works or lane.others:
                free = lane.dry + lane.others - self.lanes.ahead(lane)
                moment = min(moment, free if free > now else now + _LATER_S)
        return None if moment == float("inf") else max(now + _SOON_S, moment)

    # What is told.

    def withdraw(self, job: Job) -> None:
        """Forget a request that waits: its client left, or it waited too long."""
        self.waiting.take(job, served=False)

    def prefilled(self, pair: Pair, now: float, *, well: bool = True, prompt_tokens: int | None = None) -> None:
        """Hear that a prefill is over, and how many tokens the prompt had."""
        self.lanes.end(pair.lane, id(pair.job), now, learn=well)
        size = pair.job.prompt.size
        if prompt_tokens and size >= _TELLING:
            self.tokens_per_character += _NEWS * (min(4.0, prompt_tokens / size) - self.tokens_per_character)

    def began(self, pair: Pair, seconds: float) -> None:
        """Hear how long after prefill's reply the first token came."""
        self.to_first.learn(pair.job.tokens, seconds)

    def finished(self, room: Room, output: float, now: float, pace: float | None = None) -> None:
        """Hear that a request is over, and the seconds between its tokens where there were some."""
        load = room.load
        self.rooms.leave(room, output)
        if pace is not None:
            self.rooms.learn(room, load, pace, now)

    def alone(self, now: float, avoid: Collection[str], output: float) -> Room:
        """Return the decode engine for a request without a prefill; counted as begun. There must be a ready one."""
        room = self.rooms.choose(self.ready_decodes, now, avoid) or self.rooms.least(self.ready_decodes, avoid)
        self.rooms.enter(room, output)
        return room

    def drain_seconds(self, job: Job) -> float:
        """Return in how many seconds a request that came now would begin, all that waits before it."""
        count = max(1, len(self.ready_prefills))
        each = self.lanes.speed.pool.each
        return (self.waiting.tokens + job.tokens) * each / count

    # How it is decided.

    def _next(self, now: float) -> Pair | None:
        free = [
            lane for name in self.ready_prefills if (lane := self.lanes.by_name[name]).free(now, self.lanes.ahead(lane))
        ]
        if not free or (room := self.rooms.choose(self.ready_decodes, now)) is None:
            return None
        held: dict[int, float] = {}  # seconds of work that is kept for an engine that is busy
        for job in self.waiting.candidates(now, _COMPARED):
            best, tokens = self._best(job, free, held, now)
            if best is None:
                continue
            if best in free:
                partner = self._partner(job, room, best, now)
                if partner is not None:
                    return Pair(job, best, partner, tokens)
            else:
                held[best.number] = held.get(best.number, 0.0) + self.lanes.seconds(best, tokens)
        return None

    def _best(self, job: Job, free: Sequence[Lane], held: Mapping[int, float], now: float) -> tuple[Lane | None, float]:
        """Return the engine for a request, which may be a busy one, and the tokens that it would compute."""
        best: Lane | None = None
        least, computed = float("inf"), 0.0
        matched = self.index.matched(job.prompt) if job.prompt.keys else {}
        ratio = job.tokens / job.prompt.size if job.prompt.size else 0.0
        for lane in self._looked_at(job, matched, free):
            tokens = max(1.0, job.tokens - matched.get(lane.number, 0) * ratio)
            seconds = self.lanes.seconds(lane, tokens)
            cost = lane.starts(now) + held.get(lane.number, 0.0) + (1 + _WASTE) * seconds
            if cost < least:
                best, least, computed = lane, cost, tokens
        return best, computed

    def _looked_at(self, job: Job, matched: Mapping[int, int], free: Sequence[Lane]) -> Sequence[Lane]:
        """Return the engines worth a look: those that hold the prompt's beginning, and free ones, of many a few."""
        by_name, ready = self.lanes.by_name, self.ready_prefills
        if len(ready) <= _ENGINES:
            looked_at = [by_name[name] for name in ready]
            self._rng.shuffle(looked_at)
        else:
            looked_at = list(free) if len(free) <= _ENGINES else self._rng.sample(free, _ENGINES)
            longest = sorted(matched, key=matched.__getitem__, reverse=True)[:_ENGINES]
            lanes = self.lanes.by_number
            looked_at += [lanes[number] for number in longest if number in lanes and lanes[number].name in ready]
        if job.avoid:
            return [lane for lane in looked_at if lane.name not in job.avoid] or looked_at
        return looked_at

    def _partner(self, job: Job, room: Room, lane: Lane, now: float) -> Room | None:
        """Return the decode engine: the one that was chosen, or the best that may serve with this prefill."""
        if room.name not in job.avoid and (lane.name, room.name) not in self._excluded:
            return room
        allowed = [name for name in self.ready_decodes if (lane.name, name) not in self._excluded]
        return self.rooms.choose(allowed, now, job.avoid) or self.rooms.choose(allowed, now)

    def _least_seconds(self, job: Job) -> float:
        """Return how long its prefill takes at the least, on the engine that holds most of it."""
        most = max(self.index.matched(job.prompt).values(), default=0) if job.prompt.keys else 0
        ratio = job.tokens / job.prompt.size if job.prompt.size else 0.0
        return self.lanes.speed.pool.at(max(1.0, job.tokens - most * ratio))
