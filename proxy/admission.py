"""Requests wait here for their engines: the asyncio side of `scheduling.dispatcher`.

A request that can be placed at once is, without a turn of the loop. One that waits is refused when its time is up, when
a deadline of its own cannot be met any more, or when the queue is full and others go before it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from proxy.api_keys import ApiKey
from proxy.endpoints import Pools
from proxy.errors import BadRequestError, OverloadedError, QueueTimeoutError
from proxy.metrics import Metrics
from proxy.request import InferenceRequest
from proxy.scheduling.dispatcher import Dispatcher, Pair
from proxy.scheduling.job import Job, Targets
from proxy.scheduling.placement import Placement
from proxy.scheduling.prefix_index import chain
from proxy.scheduling.prompt_text import prompt_salt, prompt_text
from proxy.scheduling.shared_load import SharedLoad

DEADLINE_HEADER = b"x-request-deadline-ms"
_OUTPUT_TOKENS = 256.0
_TOKEN_BYTES = 4
_LONGEST_DEADLINE_MS = 86_400_000
# While other workers have work under way, only the table says when it is done: it is looked at again after this long.
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many requests may wait, and for how many seconds."""

    most: int = 4096
    seconds: float = 600.0


class Admission:
    """Gives requests their engines, in order of urgency. One for a process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pools: Pools,
        shared: SharedLoad,
        limits: QueueLimits,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._pools = pools
        self._shared = shared
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._endpoints = {endpoint.name: endpoint for endpoint in pools.endpoints}
        self._generation = -1
        self._futures: dict[Job, asyncio.Future[Pair | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        pools.on_sort = self._poke

    async def place(
        self, request: InferenceRequest, tried: Collection[str], aggregated: str | None, key: ApiKey | None = None
    ) -> Placement | None:
        """Return a placement once its engines are due, None where no decode endpoint is ready; raises `ProxyError`.

        Whoever gets one tells `prefilled`, where it has a prefill, and `finished`, each once.
        """
        if aggregated is None and self._pools.has_pair():
            pair = await self._pair(self._job(request, self._clock(), tried, key))
            if pair is not None:
                return self._placement(pair)
        if not self._pools.ready("decode"):
            return None
        return self._alone(aggregated or "no_prefill", tried)

    def prefilled(self, placement: Placement, prompt_tokens: int | None, *, well: bool) -> None:
        """Hear that a placement's prefill is over, and how many tokens its prompt had."""
        pair = placement.pair
        if pair is None:
            return
        now = self._clock()
        self._dispatcher.prefilled(pair, now, well=well, prompt_tokens=prompt_tokens)
        self._shared.ended(pair)
        if self._dispatcher.waiting:
            self._poke()

    def began(self, placement: Placement, seconds: float) -> None:
        """Hear how long after prefill's reply decode's first token came."""
        if placement.pair is not None:
            self._dispatcher.began(placement.pair, seconds)

    def finished(self, placement: Placement, pace: float | None) -> None:
        """Hear that a request is over, and the seconds between its tokens."""
        if placement.room is not None:
            self._dispatcher.finished(placement.room, placement.output, self._clock(), pace)
            if self._dispatcher.waiting:
                self._poke()

    # One request.

    async def _pair(self, job: Job) -> Pair | None:
        """Return its engines once they are due, None where no pair is left that could serve."""
        self._sync()
        self._dispatcher.submit(job, job.arrived)
        pair = self._deliver(job.arrived, job)
        if pair is None:
            self._make_room(job)
            pair = await self._wait(job)
        return pair

    def _job(self, request: InferenceRequest, now: float, tried: Collection[str], key: ApiKey | None) -> Job:
        text = prompt_text(request)
        prompt = chain(text, prompt_salt(request))
        dispatcher = self._dispatcher
        tokens = len(text) / _TOKEN_BYTES if isinstance(text, bytes) else len(text) * dispatcher.tokens_per_character
        tokens = max(1.0, tokens)
        asked = _deadline(request)
        wanted = targets_for(key, dispatcher.targets).first_token(tokens) if asked is None else asked
        return Job(
            arrived=now,
            tokens=tokens,
            deadline=now + wanted,
            prompt=prompt,
            output=_output(request),
            priority=0 if key is None else key.priority,
            share="" if key is None else key.name,
            weight=1.0 if key is None else key.weight,
            firm=asked is not None,
            avoid=frozenset(tried),
        )

    def _alone(self, reason: str, tried: Collection[str]) -> Placement:
        """Place on decode alone, at once: nothing is gained by waiting for a prefill that is not needed."""
        self._sync()
        dispatcher = self._dispatcher
        room = dispatcher.alone(self._clock(), tried, _OUTPUT_TOKENS)
        return Placement(self._endpoints[room.name], None, reason, None, room, _OUTPUT_TOKENS)

    def _placement(self, pair: Pair) -> Placement:
        decode, prefill = self._endpoints[pair.room.name], self._endpoints[pair.lane.name]
        return Placement(decode, prefill, "", pair, pair.room, pair.job.output)

    async def _wait(self, job: Job) -> Pair | None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Pair | None] = loop.create_future()
        self._futures[job] = future
        left = job.arrived + self._limits.seconds - self._clock()
        if job.firm:
            left = min(left, job.latest_start - self._clock())
        expiry = loop.call_later(max(0.0, left), self._expire, job)
        self._shared.waits(1)
        self._arm()
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(job, None) is not None:
                self._dispatcher.withdraw(job)
            elif future.done() and not future.cancelled() and future.exception() is None:
                pair = future.result()
                if pair is not None:
                    self._undo(pair)
            raise
        finally:
            self._shared.waits(-1)
            expiry.cancel()

    def _expire(self, job: Job) -> None:
        future = self._futures.pop(job, None)
        if future is None:
            return
        seconds = self._dispatcher.drain_seconds(job)
        self._dispatcher.withdraw(job)
        if future.done():
            return
        if job.firm and self._clock() - job.arrived < self._limits.seconds:
            self._metrics.refused.inc("deadline")
            future.set_exception(OverloadedError("the deadline asked for cannot be met any more", seconds))
        else:
            self._metrics.refused.inc("queue_timeout")
            future.set_exception(QueueTimeoutError(f"no engine was free within {self._limits.seconds:g} s"))

    def _make_room(self, job: Job) -> None:
        """Refuse a request where the queue is full: the least important of those that wait, or this one."""
        if len(self._futures) < self._limits.most:
            return
        last = self._dispatcher.waiting.last()
        shed = job if last is None or last.priority <= job.priority or last not in self._futures else last
        seconds = self._dispatcher.drain_seconds(shed)
        self._dispatcher.withdraw(shed)
        self._metrics.refused.inc("queue_full")
        error = OverloadedError("too many requests wait already", seconds)
        if shed is job:
            raise error
        future = self._futures.pop(shed)
        if not future.done():
            future.set_exception(error)

    # All of them.

    def _poke(self) -> None:
        """Place what is due; where no pair is left, nothing ever will be, and nobody waits on."""
        self._sync()
        if self._futures and not self._pools.has_pair():
            self._dismiss()
        self._deliver(self._clock(), None)
        self._arm()

    def _deliver(self, now: float, own: Job | None) -> Pair | None:
        """Tell those that wait of what is due; return what is due for this request, of which nobody was told."""
        found = None
        for pair in self._dispatcher.due(now):
            self._shared.began(pair)
            future = self._futures.pop(pair.job, None)
            if pair.job is own:
                found = pair
            elif future is None or future.done():
                self._undo(pair)
            else:
                future.set_result(pair)
        return found

    def _dismiss(self) -> None:
        for job, future in self._futures.items():
            self._dispatcher.withdraw(job)
            if not future.done():
                future.set_result(None)
        self._futures.clear()

    def _undo(self, pair: Pair) -> None:
        """Give the engines back of a request that left just before it was told; others may have them."""
        self._dispatcher.prefilled(pair, self._clock(), well=False)
        self._dispatcher.finished(pair.room, pair.job.output, self._clock(), None)
        self._shared.ended(pair)
        asyncio.get_running_loop().call_soon(self._poke)

    def _arm(self) -> None:
        """Have a timer for the next moment at which something may be due without an event."""
        now = self._clock()
        moment = self._dispatcher.wake_at(now)
        if self._shared.several and self._dispatcher.waiting:
            moment = min(now + _LOOK_S, math.inf if moment is None else moment)
        if moment is None or (self._timer is not None and self._timer_at <= moment):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = moment
        self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - now), self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._poke()

    def _sync(self) -> None:
        """Take over what others know: which endpoints are ready, what other workers have under way."""
        if self._generation != self._pools.generation:
            self._generation = self._pools.generation
            self._dispatcher.ready_prefills = [item.name for item in self._pools.ready("prefill")]
            self._dispatcher.ready_decodes = [item.name for item in self._pools.ready("decode")]
        self._shared.look()


def targets_for(key: ApiKey | None, usual: Targets) -> Targets:
    """Return the usual targets, with a key's own time for first tokens where it has one."""
    return usual if key is None or key.ttft_ms is None else replace(usual, base=key.ttft_ms / 1000)


def _deadline(request: InferenceRequest) -> float | None:
    """Return the seconds within which the client wants its first token, where it says so."""
    given = request.headers.get(DEADLINE_HEADER)
    if given is None:
        return None
    if not given.isdigit() or not 0 < int(given) <= _LONGEST_DEADLINE_MS:
        raise BadRequestError("x-request-deadline-ms must be a whole number of milliseconds, from 1 to a day")
    return int(given) / 1000


def _output(request: InferenceRequest) -> float:
    """Return how many tokens an answer may have, by what its client sent."""
    for name in request.kind.token_limits:
        value = request.fields.get(name)
        if type(value) is int and value > 0:
            return float(value)
    return _OUTPUT_TOKENS
