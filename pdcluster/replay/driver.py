"""The open loop: each request is sent when it is due, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pdcluster.replay.exchange import Answer
from pdcluster.replay.trace import Arrival

_READY_AHEAD = 32
_NOT_SENT = "not sent: too many in flight"

Ask = Callable[[bytes, Answer], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request; times are seconds since the start of the run, None where it never happened.

    `due` is when the trace wanted it sent and `sent` when it was. `tokens` is what the usage says, else the number of
    events with text. `error` is "" for a whole answer.
    """

    due: float
    sent: float | None
    first: float | None
    last: float | None
    ended: float
    input_tokens: int
    output_tokens: int
    tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    status: int | None
    error: str
    detail: str

    @property
    def ttft(self) -> float | None:
        """Seconds from when it was due to its first text: what a user waited, the generator's own lateness included."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for an answer of one token."""
        if self.first is None or self.last is None or self.tokens < 2:  # noqa: PLR2004
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def seconds(self) -> float:
        """Seconds from when it was due to its end."""
        return (self.ended if self.last is None else self.last) - self.due


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a request may take from when it was sent; how many may be in flight; whether outputs must be whole.

    A request that is due while `in_flight` are is not sent, and counts as failed: an open loop must not wait.
    """

    timeout: float = 120.0
    in_flight: int = 5000
    whole_output: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: seconds of it, requests sent, in flight, failed."""

    seconds: float
    sent: int
    in_flight: int
    failed: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is over: a record for each request in the order they were due.

    `seconds` is until the last answer's end, `cpu_seconds` what this process spent, `most_in_flight` the most at once.
    """

    records: tuple[Record, ...]
    seconds: float
    cpu_seconds: float
    most_in_flight: int


class Driver:
    """Sends arrivals; `ask` sends bytes and fills an answer, `write` makes the bytes, `tell` hears of the progress."""

    def __init__(
        self,
        ask: Ask,
        write: Callable[[Arrival], bytes],
        limits: Limits,
        tell: Callable[[Progress], None],
        clock: Callable[[], float] = time.perf_counter,
        tell_every: float = 5.0,
    ) -> None:
        self._ask = ask
        self._write = write
        self._limits = limits
        self._tell = tell
        self._clock = clock
        self._tell_every = tell_every
        self._start = 0.0
        self._in_flight = 0
        self._most = 0
        self._records: dict[int, Record] = {}

    async def run(self, arrivals: Sequence[Arrival]) -> Run:
        """Send them all and wait for their ends, each within its time limit."""
        unwritten = iter(arrivals)
        ready = deque(self._write(arrival) for arrival in islice(unwritten, _READY_AHEAD))
        self._start, spent = self._clock(), time.process_time()
        teller = asyncio.create_task(self._telling())
        try:
            async with asyncio.TaskGroup() as group:
                await self._send_all(arrivals, ready, unwritten, group)
        finally:
            teller.cancel()
        seconds = max((record.ended for record in self._records.values()), default=0.0)
        records = tuple(record for _, record in sorted(self._records.items()))
        return Run(records, seconds, time.process_time() - spent, self._most)

    async def _send_all(
        self, arrivals: Sequence[Arrival], ready: deque[bytes], unwritten: Iterator[Arrival], group: asyncio.TaskGroup
    ) -> None:
        """Send each when it is due; requests are written ahead, in what time is left before the next."""
        for number, arrival in enumerate(arrivals):
            while len(ready) < _READY_AHEAD and (not ready or self._now() < arrival.due):
                following = next(unwritten, None)
                if following is None:
                    break
                ready.append(self._write(following))
                await asyncio.sleep(0)  # answers that come meanwhile are timed as they come
            wait = arrival.due - self._now()
            if wait > 0:
                await asyncio.sleep(wait)
            request = ready.popleft()
            if self._in_flight >= self._limits.in_flight:
                self._note(number, arrival, None, Answer(error=_NOT_SENT))
                continue
            self._in_flight += 1
            self._most = max(self._most, self._in_flight)
            group.create_task(self._one(number, arrival, request))

    async def _one(self, number: int, arrival: Arrival, request: bytes) -> None:
        answer, sent = Answer(), self._now()
        try:
            async with asyncio.timeout(self._limits.timeout):
                await self._ask(request, answer)
        except TimeoutError:
            answer.fail("timeout", f"not over {self._limits.timeout:g} s after it was sent")
        finally:
            self._in_flight -= 1
        if answer.first is None:
            answer.fail("no text")
        elif self._limits.whole_output and (answer.tokens or answer.events) < arrival.output_tokens:
            answer.fail("answer too short", f"{answer.tokens or answer.events} of {arrival.output_tokens} tokens")
        self._note(number, arrival, sent, answer)

    def _note(self, number: int, arrival: Arrival, sent: float | None, answer: Answer) -> None:
        self._records[number] = Record(
            due=arrival.due,
            sent=sent,
            first=None if answer.first is None else answer.first - self._start,
            last=None if answer.last is None else answer.last - self._start,
            ended=self._now(),
            input_tokens=arrival.input_tokens,
            output_tokens=arrival.output_tokens,
            tokens=answer.tokens or answer.events,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            status=answer.status,
            error=answer.error,
            detail=answer.detail,
        )

    async def _telling(self) -> None:
        while True:
            await asyncio.sleep(self._tell_every)
            failed = sum(1 for record in self._records.values() if record.error)
            sent = len(self._records) + self._in_flight
            self._tell(Progress(self._now(), sent, self._in_flight, failed))

    def _now(self) -> float:
        return self._clock() - self._start
