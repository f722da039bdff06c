"""Decode engines as rooms with seats: how many sequences each runs, how fast they are, which one is next. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from proxy.scheduling.learned import Lines

# An engine's own figures are believed for so long without news (seconds); then it is tried again.
_STALE_S = 60.0
# A stream over the target for tokens costs this much more for each part that it is over.
_OVER_TARGET = 10.0
# Forecasts closer than this are equal: who takes the smallest difference for real herds.
_SAME = 0.02
_LOOKED_AT = 8


@dataclass(slots=True, eq=False)
class Room:
    """One decode engine. `taken` are its sequences, reserved ones included; `tokens` what they may still write."""

    name: str
    taken: int = 0
    tokens: float = 0.0
    others: int = 0  # sequences of other workers
    seats: int | None = None  # sequences at once (max_num_seqs), where that is known
    learned: float = float("-inf")

    @property
    def load(self) -> int:
        """The sequences that run there."""
        return self.taken + self.others

    @property
    def open(self) -> bool:
        """Tell whether one more would run at once."""
        return self.seats is None or self.load < self.seats


class Rooms:
    """All decode engines, and what has been learned of how fast they write."""

    def __init__(self, rng: random.Random, per_token: float = 0.03) -> None:
        self.pace = Lines(0.02, 0.0002)  # seconds between tokens, by sequences at once
        self.by_name: dict[str, Room] = {}
        self._rng = rng
        self._per_token = per_token

    def add(self, name: str, seats: int | None = None) -> Room:
        """Make an engine known, and how many sequences it runs at once, where that is known."""
        room = self.by_name[name] = Room(name, seats=seats)
        return room

    def cost(self, room: Room) -> float:
        """Return what one more stream there would cost: seconds between tokens, and more where over the target."""
        pace = self.pace.of(room.name).at(room.load + 1)
        return pace + _OVER_TARGET * max(0.0, pace - self._per_token)

    def choose(self, names: Iterable[str], now: float, avoid: Collection[str] = ()) -> Room | None:
        """Return the engine for one more stream, None where all are full. Of many, some are looked at by chance."""
        rooms = [room for name in names if (room := self.by_name[name]).open and name not in avoid]
        if not rooms:
            return None
        if len(rooms) > 2 * _LOOKED_AT:
            rooms = self._rng.sample(rooms, _LOOKED_AT)
        costs = []
        for room in rooms:
            if now - room.learned > _STALE_S:
                self.pace.forget(room.name)
            costs.append(self.cost(room))
        limit = min(costs) * (1 + _SAME)
        best = [room for room, cost in zip(rooms, costs, strict=True) if cost <= limit]
        least = min(room.tokens for room in best)
        best = [room for room in best if room.tokens <= least]
        return best[int(self._rng.random() * len(best))]

    def least(self, names: Iterable[str], avoid: Collection[str] = ()) -> Room:
        """Return the engine with the fewest sequences, full or not."""
        rooms = [self.by_name[name] for name in names]
        return min([room for room in rooms if room.name not in avoid] or rooms, key=lambda room: room.load)

    def enter(self, room: Room, tokens: float) -> None:
        """Take a seat."""
        room.taken += 1
        room.tokens += tokens

    def leave(self, room: Room, tokens: float) -> None:
        """Give the seat back."""
        room.taken -= 1
        room.tokens = max(0.0, room.tokens - tokens) if room.taken else 0.0

    def learn(self, room: Room, load: float, pace: float, now: float) -> None:
        """Take the seconds between a stream's tokens, and how many ran beside it."""
        self.pace.learn(room.name, load, pace)
        room.learned = now
