"""A cluster in virtual time: engines, a router and a trace, event by event; nothing waits, nothing is sent.

Messages between router and engines take no time. Of what happens at one moment engines come before arrivals, and a
router hears of an engine's event after its consequences inside engines (a decode that begins, KV that is freed).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdcluster.replay.figures import Targets
from pdcluster.replay.trace import Arrival
from pdcluster.simulation.engine import Engine
from pdcluster.simulation.job import Event, Job, Told, Work
from pdcluster.simulation.prefix_cache import BlockChanges
from pdcluster.simulation.profile import EngineProfile
from pdcluster.simulation.router import Cluster, Decisions, Load, Request, Router, SimulationError

_ROUTER = -1
_PROGRESS_EVERY = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """What is simulated. `slow` maps (role, index) to a factor by which that engine is slower than `profile`."""

    prefill: int
    decode: int
    profile: EngineProfile = field(default_factory=EngineProfile)
    targets: Targets = field(default_factory=Targets)
    seed: int = 0
    slow: Mapping[tuple[str, int], float] | None = None


@dataclass(slots=True)
class Outcome:
    """What became of a request; times are of the run, None where it never came to that. `error` is "" of a good one."""

    request: Request
    prefill: int | None = None
    decode: int | None = None
    sent: float | None = None
    prefilled: float | None = None
    cached_tokens: int = 0
    first: float | None = None
    done: float | None = None
    error: str = "unplaced"
    job: Job | None = None  # that runs now

    @property
    def ttft(self) -> float | None:
        """Return the seconds from arrival to the first token."""
        return None if self.first is None else self.first - self.request.arrived

    @property
    def tpot(self) -> float | None:
        """Return the mean seconds between tokens, None of fewer than two."""
        if self.first is None or self.done is None or self.request.output_tokens < 2:  # noqa: PLR2004
            return None
        return (self.done - self.first) / (self.request.output_tokens - 1)


class Simulation:
    """One run. It is what its router sees as the cluster."""

    def __init__(self, shape: Shape, make_router: Callable[[Cluster], Router]) -> None:
        self.prefill, self.decode = shape.prefill, shape.decode
        self.profile, self.targets, self.seed = shape.profile, shape.targets, shape.seed
        self.now = 0.0
        self.outcomes: list[Outcome] = []
        self.engines: list[Engine] = []
        self._router = make_router(self)
        self._blocks: Callable[..., Any] | None = getattr(self._router, "blocks", None)
        self._changes: list[BlockChanges] = []
        self._add_engines(shape)
        self._due = [math.inf] * len(self.engines)
        self._wake = math.inf
        self._queue: list[tuple[float, int, int]] = []  # time, serial, engine or router
        self._serial = 0
        self._todo: deque[tuple[Any, ...]] = deque()

    def load(self, role: str, index: int) -> Load:
        """Return the load of an engine, as /metrics would have it now."""
        engine = self._engine(role, index)
        return Load(engine.running, engine.waiting, engine.kv_usage)

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[int], None] | None = None) -> list[Outcome]:
        """Run until nothing happens any more; return the outcomes in order of arrival.

        `progress` hears now and then how many requests have arrived.
        """
        block_tokens = self.profile.block_tokens
        for number, arrival in enumerate(arrivals):
            if progress is not None and number % _PROGRESS_EVERY == 0:
                progress(number)
            self._run_until(arrival.due)
            whole = arrival.blocks[: arrival.input_tokens // block_tokens]
            request = Request(number, arrival.due, arrival.input_tokens, arrival.output_tokens, whole)
            self.outcomes.append(Outcome(request))
            self.now = arrival.due
            self._decide(self._router.arrive(arrival.due, request))
        self._run_until(math.inf)
        return self.outcomes

    def _add_engines(self, shape: Shape) -> None:
        for role, count in (("prefill", shape.prefill), ("decode", shape.decode)):
            for index in range(count):
                factor = (shape.slow or {}).get((role, index), 1.0)
                profile = shape.profile if factor == 1.0 else shape.profile.slowed(factor)
                changes = BlockChanges() if self._blocks is not None else None
                self.engines.append(Engine(profile, changes=changes))
                if changes is not None:
                    self._changes.append(changes)

    def _engine(self, role: str, index: int) -> Engine:
        return self.engines[index if role == "prefill" else self.prefill + index]

    # Time.

    def _run_until(self, moment: float) -> None:
        """Let everything happen that is due at a time or before; of endless time, until nothing is."""
        queue, due = self._queue, self._due
        while queue and queue[0][0] <= moment:
            at, _, place = heapq.heappop(queue)
            if place == _ROUTER:
                if at == self._wake:
                    self.now, self._wake = at, math.inf
                    self._decide(self._router.wake(at))
            elif at == due[place]:
                self.now = at
                for event in self.engines[place].advance(at):
                    self._heard(event)
                self._touched(place)

    def _touched(self, place: int) -> None:
        """Note when an engine is next to be looked at, and tell of its KV events."""
        moment = self.engines[place].next_event()
        if moment != self._due[place]:
            self._due[place] = moment
            if moment != math.inf:
                self._push(moment, place)
        if self._blocks is not None:
            changes = self._changes[place]
            if changes.stored or changes.removed:
                taken = changes.take()
                prefills = place < self.prefill
                index = place if prefills else place - self.prefill
                self._blocks(self.now, "prefill" if prefills else "decode", index, taken.stored, taken.removed)

    def _push(self, moment: float, place: int) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (moment, self._serial, place))

    # What engines tell.

    def _heard(self, event: Event) -> None:
        number = event.job.name
        outcome = self.outcomes[number]  # type: ignore[call-overload] # names are numbers here
        now, told = event.at, event.told
        if told is Told.DONE:
            if event.job.work is Work.PREFILL:
                self._prefilled(now, outcome, event.job.cached)
            else:
                outcome.done, outcome.job, outcome.error = now, None, ""
                self._decide(self._router.finished(now, outcome.request.number))
        elif told is Told.FIRST and event.job.work is not Work.PREFILL:
            if outcome.prefill is None:
                outcome.cached_tokens = event.job.cached
            outcome.first = now
            self._decide(self._router.first_token(now, outcome.request.number))
        elif told is Told.PULLED and outcome.prefill is not None:
            self.engines[outcome.prefill].release(now, number)
            self._touched(outcome.prefill)

    def _prefilled(self, now: float, outcome: Outcome, cached: int) -> None:
        outcome.prefilled, outcome.cached_tokens, outcome.job = now, cached, None
        if outcome.decode is not None:
            self._pull(outcome, outcome.decode)
        self._decide(self._router.prefilled(now, outcome.request.number, cached))

    def _pull(self, outcome: Outcome, decode: int) -> None:
        """Hand over to decode, unless the lease is over."""
        number = outcome.request.number
        if outcome.prefill is None or not self.engines[outcome.prefill].claim(number):
            self._failed(outcome, "lease")
        elif not self._submit(outcome, self.prefill + decode, Work.PULL):
            self.engines[outcome.prefill].release(self.now, number)
            self._touched(outcome.prefill)

    # What the router decides.

    def _decide(self, decisions: Decisions) -> None:
        self._todo.extend(decisions)
        while self._todo:
            decision = self._todo.popleft()
            match decision:
                case ("pair", number, prefill, decode):
                    self._send(number, prefill, decode)
                case ("prefill", number, prefill):
                    self._send(number, prefill, None)
                case ("alone", number, decode):
                    outcome = self._idle(number, decision)
                    self._check(decode, self.decode, decision)
                    outcome.prefill, outcome.decode, outcome.prefilled = None, decode, None
                    self._submit(outcome, self.prefill + decode, Work.WHOLE)
                case ("decode", number, decode):
                    self._decode_later(number, decode, decision)
                case ("refuse", number):
                    self._idle(number, decision).error = "refused"
                case ("wake", at):
                    if at < self._wake:
                        self._wake = max(at, self.now)
                        self._push(self._wake, _ROUTER)
                case _:
                    raise SimulationError(f"the router decided {decision!r}; see pdcluster.simulation.router")

    def _send(self, number: int, prefill: int, decode: int | None) -> None:
        decision = ("pair", number, prefill, decode)
        outcome = self._idle(number, decision)
        self._check(prefill, self.prefill, decision)
        if decode is not None:
            self._check(decode, self.decode, decision)
        outcome.prefill, outcome.decode, outcome.prefilled = prefill, decode, None
        self._submit(outcome, prefill, Work.PREFILL)

    def _decode_later(self, number: int, decode: int, decision: tuple[Any, ...]) -> None:
        outcome = self.outcomes[number] if 0 <= number < len(self.outcomes) else None
        self._check(decode, self.decode, decision)
        if outcome is None or outcome.prefill is None or outcome.decode is not None or outcome.done is not None:
            raise SimulationError(f"the router decided {decision!r}, but no prefill without a decode is there")
        outcome.decode = decode
        if outcome.prefilled is not None:
            self._pull(outcome, decode)

    def _submit(self, outcome: Outcome, place: int, work: Work) -> bool:
        request = outcome.request
        tokens = 1 if work is Work.PREFILL else request.output_tokens
        job = Job(request.number, request.prompt_tokens, tokens, request.blocks, work)
        if not self.engines[place].submit(self.now, job):
            self._failed(outcome, "too_long")
            return False
        outcome.job, outcome.error = job, "unfinished"
        outcome.sent = self.now if outcome.sent is None else outcome.sent
        self._touched(place)
        return True

    def _failed(self, outcome: Outcome, reason: str) -> None:
        outcome.job, outcome.error = None, reason
        outcome.decode = None
        self._todo.extend(self._router.failed(self.now, outcome.request.number, reason))

    def _idle(self, number: int, decision: tuple[Any, ...]) -> Outcome:
        """Return the outcome of a request that runs nowhere."""
        if not 0 <= number < len(self.outcomes):
            raise SimulationError(f"the router decided {decision!r}, but no such request has arrived")
        outcome = self.outcomes[number]
        if outcome.job is not None or outcome.done is not None:
            raise SimulationError(f"the router decided {decision!r}, but the request runs or is over")
        return outcome

    def _check(self, index: int, count: int, decision: tuple[Any, ...]) -> None:
        if not 0 <= index < count:
            raise SimulationError(f"the router decided {decision!r}, but engines count from 0 to {count - 1}")
