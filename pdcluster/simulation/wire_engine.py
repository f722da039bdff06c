"""One simulated engine in real time: timers around the model in `engine.py`, and the handoffs between engines."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdcluster.simulation.answers import Answer
from pdcluster.simulation.engine import Engine
from pdcluster.simulation.job import Event, Job, Told, Work
from pdcluster.simulation.metrics import EngineMetrics
from pdcluster.simulation.profile import EngineProfile

if TYPE_CHECKING:
    from pdcluster.simulation.kv_events import KvEventPublisher

MODEL = "m"
_LOAD_HEADER = "endpoint-load-metrics"


@dataclass(slots=True)
class Counted:
    """What an engine was asked for: prefills whose KV it keeps, fetches, requests served alone, dead handoffs."""

    prefills: int = 0
    fetches: int = 0
    alone: int = 0
    dead_handoffs: int = 0


@dataclass(slots=True)
class Handoff:
    """KV that another engine keeps, by the name of its job there; None where that engine does not have it any more."""

    holder: WireEngine
    name: str
    alive: bool


@dataclass(slots=True, eq=False)
class _Running:
    answer: Answer
    job: Job
    handoff: Handoff | None


@dataclass(slots=True)
class Clocks:
    """Monotonic seconds for the engine, seconds since 1970 for what is told."""

    now: Callable[[], float]
    wall: Callable[[], float]


class WireEngine:
    """Runs jobs and has their answers written as they go."""

    def __init__(
        self, name: str, profile: EngineProfile, clocks: Clocks, publisher: KvEventPublisher | None = None
    ) -> None:
        self.name = name
        self.clocks = clocks
        self.publisher = publisher
        self.engine = Engine(profile, every_step=True, changes=publisher.changes if publisher is not None else None)
        self.metrics = EngineMetrics(self.engine, MODEL)
        self.counted = Counted()
        self._running: dict[str, _Running] = {}
        self._claimed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Tell whether the model's context has room for so much."""
        return prompt_tokens + output_tokens <= self.engine.profile.max_model_len

    def submit(self, job: Job, answer: Answer, handoff: Handoff | None = None) -> bool:
        """Run a job, its name the answer's; false where it could never fit. `on_gone` of the answer is taken."""
        now = self._catch_up()
        if not self.engine.submit(now, job):
            return False
        running = _Running(answer, job, handoff)
        self._running[answer.name] = running
        answer.reply.on_gone = lambda: self._cancel(running)
        self._rearm()
        return True

    def claim(self, name: str) -> bool:
        """Hear that a decode will fetch a job's KV; false where that is gone, or was claimed before."""
        self._catch_up()
        if name in self._claimed or not self.engine.claim(name):
            return False
        self._claimed.add(name)
        return True

    def release(self, name: str) -> None:
        """Free a job's KV that was kept."""
        now = self._catch_up()
        self._claimed.discard(name)
        self.engine.release(now, name)
        self._rearm()

    def stop(self) -> None:
        """Do nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    # Time.

    def _catch_up(self) -> float:
        """Let the engine do what was due until now."""
        now = self.clocks.now()
        if self.engine.next_event() <= now:
            for event in self.engine.advance(now):
                self._heard(event)
        return now

    def _rearm(self) -> None:
        if self.publisher is not None:
            self.publisher.publish()
        due = self.engine.next_event()
        if due == self._due and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due, self._timer = due, None
        if due != math.inf:
            delay = max(0.0, due - self.clocks.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._catch_up()
        self._rearm()

    # What the engine tells.

    def _heard(self, event: Event) -> None:
        name, told = str(event.job.name), event.told
        running = self._running.get(name)
        if told is Told.EXPIRED or running is None:
            return
        if told is Told.PULLED:
            self._pulled(running)
        elif told is Told.DONE:
            self._done(running)
        elif not event.job.gone:
            running.answer.token()

    def _pulled(self, running: _Running) -> None:
        job, profile = running.job, self.engine.profile
        self.metrics.transferred(job.pull_s, job.pull_tokens * profile.kv_bytes_per_token)
        self._give_back(running)
        if job.gone:
            self._forget(running)

    def _done(self, running: _Running) -> None:
        answer, job = running.answer, running.job
        if job.work is not Work.PULL:
            answer.cached_tokens = job.cached
        if answer.handoff is not None:
            # Decode tells these in place of its own, which are all tokens that it fetched.
            answer.handoff["remote_prefill_cached_tokens"] = job.cached
        answer.reply.on_gone = None
        self._forget(running)
        answer.done(self._load_header(answer.load_format))

    def _load_header(self, wanted: str) -> dict[str, str]:
        """Return the engine's load as vLLM reports it with a whole answer to whoever asks for it."""
        if wanted.lower() not in ("json", "text"):
            return {}
        load = {"kv_cache_usage_perc": self.engine.kv_usage, "num_requests_waiting": float(self.engine.waiting)}
        if wanted.lower() == "json":
            return {_LOAD_HEADER: f"JSON {json.dumps({'named_metrics': load})}"}
        return {_LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())}

    def _cancel(self, running: _Running) -> None:
        """Stop a job whose client left. One that fetches holds its memory until all has arrived, as does its holder."""
        now = self._catch_up()
        if self._running.get(running.answer.name) is not running:
            return
        self.engine.cancel(now, running.job)
        fetching = running.handoff is not None and running.job.holds and running.job.joined < 0
        if not fetching:
            self._give_back(running)
            self._forget(running)
        self._rearm()

    def _give_back(self, running: _Running) -> None:
        handoff, running.handoff = running.handoff, None
        if handoff is not None and handoff.alive:
            handoff.holder.release(handoff.name)

    def _forget(self, running: _Running) -> None:
        self._running.pop(running.answer.name, None)
        if self.publisher is not None:
            self.publisher.forget(running.job.hashes)
