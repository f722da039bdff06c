"""Requests and tokens a minute for each API key, counted over all workers.

A sliding window: what was used in this minute of the clock, and of the one before the share that is still within sixty
seconds. Counts lie in shared memory; workers may overshoot by what they admit in the same instant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.api_keys import ApiKey
from proxy.shared_counts import SharedCounts

COLUMNS_PER_KEY = 6  # for even and odd minutes: which one it is, requests, tokens
_MINUTE = 60.0
_REQUESTS, _TOKENS = 1, 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """`limit` names what is spent; `seconds` until a retry can succeed, None where it never can."""

    limit: str
    seconds: float | None


class RateLimits:
    """`first` is the first of the columns that belong to keys; `clock` is wall-clock time in seconds."""

    def __init__(self, counts: SharedCounts, first: int, clock: Callable[[], float]) -> None:
        self._counts = counts
        self._first = first
        self._clock = clock

    def admit(self, key: ApiKey, tokens: int) -> Refusal | None:
        """Count a request and its estimated tokens, or say why it may not pass."""
        requests_limit, tokens_limit = key.requests_per_minute, key.tokens_per_minute
        if requests_limit is None and tokens_limit is None:
            return None
        now = self._clock()
        if requests_limit is not None:
            wait = self._wait(key, _REQUESTS, 1, requests_limit, now)
            if wait != 0:
                return Refusal("requests_per_minute", wait)
        if tokens_limit is not None:
            wait = self._wait(key, _TOKENS, tokens, tokens_limit, now)
            if wait != 0:
                return Refusal("tokens_per_minute", wait)
        self._add(key, now, 1, tokens)
        return None

    def correct(self, key: ApiKey, tokens: int) -> None:
        """Add tokens that a request took beyond its estimate, or give back what it didn't."""
        if key.tokens_per_minute is not None and tokens:
            self._add(key, self._clock(), 0, tokens)

    def _wait(self, key: ApiKey, what: int, need: int, limit: int, now: float) -> float | None:
        """Return the seconds until `need` more fit under a limit, None if they never do."""
        if need > limit:
            return None
        minute = int(now // _MINUTE)
        passed = now - minute * _MINUTE
        current, before = self._used(key, minute, what), self._used(key, minute - 1, what)
        room = limit - need - current
        if room >= 0:
            if before <= room:
                return 0.0
            return max(0.0, _MINUTE * (1 - room / before) - passed)
        return _MINUTE - passed + _MINUTE * (1 - (limit - need) / current)

    def _used(self, key: ApiKey, minute: int, what: int) -> int:
        column = self._column(key, minute)
        counts = self._counts
        if counts.rows == 1:
            return counts.own(column + what) if counts.own(column) == minute else 0
        rows = [row for row in range(counts.rows) if counts.of(row, column) == minute]
        return sum(counts.of(row, column + what) for row in rows)

    def _add(self, key: ApiKey, now: float, requests: int, tokens: int) -> None:
        minute = int(now // _MINUTE)
        column = self._column(key, minute)
        if self._counts.own(column) != minute:
            self._counts.put(column + _REQUESTS, 0)
            self._counts.put(column + _TOKENS, 0)
            self._counts.put(column, minute)
        self._counts.add(column + _REQUESTS, requests)
        self._counts.add(column + _TOKENS, tokens)

    def _column(self, key: ApiKey, minute: int) -> int:
        return self._first + key.index * COLUMNS_PER_KEY + minute % 2 * (COLUMNS_PER_KEY // 2)
