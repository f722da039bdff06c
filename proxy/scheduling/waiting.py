"""The queue of requests that wait for an engine: by priority, then fair between keys, then by least slack. Pure.

Among the requests of one key those go first that must begin soonest to be in time. Those that cannot be in time any
more are late: they wait behind the others, oldest first, and get a share of what is served so that none waits for ever.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from proxy.scheduling.job import Job

# Of the tokens that are served while requests are late, this share is theirs even if others could still be in time.
_LATE_SHARE = 0.03


def _latest_start(job: Job) -> float:
    return job.latest_start


@dataclass(slots=True)
class _Line:
    """The waiting requests of one key in one priority. `served` are its tokens by weight, as a clock of its own."""

    served: float
    hopeful: list[Job] = field(default_factory=list)
    late: deque[Job] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.hopeful) + len(self.late)

    def sort_out(self, now: float) -> None:
        """Move those whose time has passed."""
        passed = 0
        for job in self.hopeful:
            if job.latest_start >= now:
                break
            job.late = True
            self.late.append(job)
            passed += 1
        del self.hopeful[:passed]


class Waiting:
    """All requests that wait."""

    def __init__(self) -> None:
        self._levels: dict[int, dict[str, _Line]] = {}
        self._owed = 0.0  # tokens that late requests are owed
        self._count = 0
        self.tokens = 0.0

    def __len__(self) -> int:
        return self._count

    def put(self, job: Job) -> None:
        """Let a request wait; its `latest_start` says how urgent it is."""
        level = self._levels.setdefault(job.priority, {})
        line = level.get(job.share)
        if line is None:
            # Who comes anew begins where the others are: what was not asked for earlier is not owed.
            line = level[job.share] = _Line(min((other.served for other in level.values()), default=0.0))
        if job.late:
            line.late.append(job)
        else:
            insort(line.hopeful, job, key=_latest_start)
        self._count += 1
        self.tokens += job.tokens

    def candidates(self, now: float, most: int) -> list[Job]:
        """Return up to so many requests in the order in which they should be served."""
        found: list[Job] = []
        for priority in sorted(self._levels):
            level = self._levels[priority]
            lines = sorted(level.values(), key=lambda line: line.served) if len(level) > 1 else list(level.values())
            for line in lines:
                line.sort_out(now)
            for job in self._in_turn(lines):
                found.append(job)
                if len(found) == most:
                    return found
        return found

    def _in_turn(self, lines: list[_Line]) -> Iterator[Job]:
        """Yield the requests of one priority."""
        owed = self._owed > 0
        if owed:
            for line in lines:
                if line.late and self._owed >= line.late[0].tokens:
                    yield line.late[0]
                    break
        for line in lines:
            yield from line.hopeful
        for line in lines:
            yield from line.late

    def take(self, job: Job, *, served: bool = True) -> None:
        """Remove a request that is served now, or that left."""
        level = self._levels[job.priority]
        line = level[job.share]
        if job.late:
            line.late.remove(job)
        else:
            line.hopeful.remove(job)
        if not line:
            del level[job.share]
            if not level:
                del self._levels[job.priority]
        self._count -= 1
        self.tokens -= job.tokens
        if served:
            line.served += job.tokens / job.weight
            self._owed = max(0.0, self._owed - job.tokens) if job.late else self._owed + _LATE_SHARE * job.tokens
        if not self._count:
            self._owed = self.tokens = 0.0

    def last(self) -> Job | None:
        """Return the request that is shed first: of the lowest priority the last of who has most, late ones before."""
        if not self._count:
            return None
        level = self._levels[max(self._levels)]
        line = max(level.values(), key=lambda each: each.served + sum(job.tokens / job.weight for job in each.hopeful))
        return line.late[-1] if line.late else line.hopeful[-1]
