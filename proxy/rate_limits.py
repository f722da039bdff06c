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
_HALF = COLUMNS_PER_KEY // 2


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
        minute = int(now // _MINUTE)
        asked, took, asked_before, took_before = self._used(key, minute)
        if requests_limit is not None and asked + asked_before >= requests_limit:
            wait = _wait(1, requests_limit, asked, asked_before, now % _MINUTE)
            if wait != 0:
                return Refusal("requests_per_minute", wait)
        if tokens_limit is not None and took + took_before + tokens > tokens_limit:
            wait = _wait(tokens, tokens_limit, took, took_before, now % _MINUTE)
            if wait != 0:
                return Refusal("tokens_per_minute", wait)
        self._add(key, minute, 1, tokens)
        return None

    def correct(self, key: ApiKey, tokens: int, admitted: float) -> None:
        """Add tokens that a request, admitted then, took beyond its estimate, or give back what it didn't.

        Nothing is given back in a later minute, which it never burdened.
        """
        minute = int(self._clock() // _MINUTE)
        if key.tokens_per_minute is not None and (tokens > 0 or int(admitted // _MINUTE) == minute):
            self._add(key, minute, 0, tokens)

    def now(self) -> float:
        """Return the clock's time."""
        return self._clock()

    def _used(self, key: ApiKey, minute: int) -> tuple[int, int, int, int]:
        """Return requests and tokens of this minute, then those of the one before, over all workers."""
        current, before = (0, _HALF) if minute % 2 == 0 else (_HALF, 0)
        asked = took = asked_before = took_before = 0
        for row in self._counts.part(self._first + key.index * COLUMNS_PER_KEY, COLUMNS_PER_KEY):
            if row[current] == minute:
                asked += row[current + _REQUESTS]
                took += row[current + _TOKENS]
            if row[before] == minute - 1:
                asked_before += row[before + _REQUESTS]
                took_before += row[before + _TOKENS]
        return asked, took, asked_before, took_before

    def _add(self, key: ApiKey, minute: int, requests: int, tokens: int) -> None:
        column = self._first + key.index * COLUMNS_PER_KEY + minute % 2 * _HALF
        cells = self._counts.mine
        if cells[column] != minute:
            cells[column + _REQUESTS] = cells[column + _TOKENS] = 0
            cells[column] = minute
        cells[column + _REQUESTS] += requests
        cells[column + _TOKENS] += tokens


def _wait(need: int, limit: int, current: int, before: int, passed: float) -> float | None:
    """Return the seconds until `need` more fit under a limit, None if they never do.

    `passed` are the seconds of this minute; what was used in the one before counts by the share still within sixty.
    """
    if need > limit:
        return None
    room = limit - need - current
    if room >= 0:
        return 0.0 if before <= room else max(0.0, _MINUTE * (1 - room / before) - passed)
    return _MINUTE - passed + _MINUTE * (1 - (limit - need) / current)
