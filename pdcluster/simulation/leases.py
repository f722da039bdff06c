"""KV that finished prefills keep for a decode elsewhere, until it was fetched or the lease ends. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

from pdcluster.simulation.job import Job


class Leases:
    """Finished prefills by name. All leases are equally long, so that they end in the order in which they began."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: dict[Hashable, tuple[Job, float]] = {}
        self._ends: deque[tuple[float, Hashable]] = deque()

    def __len__(self) -> int:
        """Return how many prefills are kept."""
        return len(self._kept)

    def keep(self, job: Job, now: float) -> None:
        """Keep a prefill's KV from now on."""
        until = now + self._seconds
        self._kept[job.name] = (job, until)
        self._ends.append((until, job.name))

    def claim(self, name: Hashable) -> bool:
        """Let the lease of a prefill never end, since a decode renews it; false where it is gone."""
        kept = self._kept.get(name)
        if kept is None:
            return False
        self._kept[name] = (kept[0], math.inf)
        return True

    def take(self, name: Hashable) -> Job | None:
        """Keep a prefill no longer; return its job, None where it is gone."""
        kept = self._kept.pop(name, None)
        return kept[0] if kept is not None else None

    def next_end(self) -> float:
        """Return when the next lease ends, infinity if none does."""
        ends, kept = self._ends, self._kept
        while ends:
            until, name = ends[0]
            if name in kept and kept[name][1] == until:
                return until
            ends.popleft()
        return math.inf

    def expire(self) -> Job:
        """Take the job whose lease ends next."""
        _, name = self._ends.popleft()
        return self._kept.pop(name)[0]
