"""An engine in time, without a model and without a clock: the caller says what time it is, and looks again. Pure.

What is as in vLLM: one queue, first come first served; steps that compute a token of each running sequence and, within
the token budget, parts of prompts, so that a prefill stalls the sequences beside it; KV blocks shared by prefix; the
youngest is preempted when they run out, and computed again; KV kept for a decode elsewhere until it was fetched or its
lease ended. What is simpler: a fetch begins as soon as it is first in the queue, not at the next step; a prompt's
blocks are taken all at once; generated tokens are not cached.

Between two changes of the batch all steps are alike but for the context that grows, so that they are made in one leap
(`every_step` forbids it): the cost of a request does not depend on how many tokens it generates.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from pdcluster.simulation.job import Event, Job, Told, Work
from pdcluster.simulation.leap import Leap
from pdcluster.simulation.leases import Leases
from pdcluster.simulation.prefix_cache import BlockChanges, PrefixCache
from pdcluster.simulation.profile import EngineProfile

_NO_LIMIT = 1 << 60


@dataclass(slots=True)
class Counts:
    """What an engine has done since it started; names follow vLLM's counters."""

    prompt_tokens: int = 0  # computed or found here
    cached_tokens: int = 0
    pulled_tokens: int = 0
    generated_tokens: int = 0
    preempted: int = 0
    expired: int = 0
    done: int = 0
    busy_s: float = 0.0


class Engine:
    """One engine. Call `advance(now)` before anything else at a time, and again when `next_event()` has come.

    A job is given once; its name must be unique while the engine has it or keeps its KV.
    """

    def __init__(
        self, profile: EngineProfile, *, every_step: bool = False, changes: BlockChanges | None = None
    ) -> None:
        self.profile = profile
        self.counts = Counts()
        self.cache = PrefixCache(profile.kv_blocks, profile.cache_blocks, changes)
        self._every_step = every_step
        self._budget = profile.chunk_tokens or _NO_LIMIT
        self._serial = 0
        self._waiting: deque[Job] = deque()
        self._loading: list[tuple[float, int, Job]] = []
        self._loaded: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: dict[Job, None] = {}  # in the order in which they joined
        self._finishing: list[tuple[int, int, Job]] = []  # by last step
        self._growing: list[tuple[int, int, Job]] = []  # by the step before which one more block is needed
        self._leases = Leases(profile.lease_s)
        self._leap = Leap(profile)
        self._step = 0
        self._context = 0  # tokens of all decoding sequences
        self._shares: list[tuple[Job, int]] = []  # of the present step: tokens of prompts
        self._firsts: list[Job] = []  # fetched jobs whose first token the present step makes

    # What is asked.

    @property
    def running(self) -> int:
        """Return how many sequences are in the batch."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Return how many requests are not in the batch yet; those that fetch KV are among them, as in vLLM."""
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    @property
    def kept(self) -> int:
        """Return how many finished prefills still hold KV."""
        return len(self._leases)

    @property
    def kv_usage(self) -> float:
        """Return the share of KV memory in use; of seats where memory is unlimited."""
        if self.profile.kv_blocks is not None:
            return min(1.0, self.cache.used / self.profile.kv_blocks)
        return min(1.0, (self.running + self.waiting) / self.profile.max_num_seqs)

    def next_event(self) -> float:
        """Return when something happens next if nothing comes from outside; infinity if nothing does."""
        moment = min(self._leap.end, self._leases.next_end())
        return min(moment, self._loading[0][0]) if self._loading else moment

    # What is told.

    def advance(self, now: float) -> list[Event]:
        """Let time pass until `now`; return what happened, in order."""
        events: list[Event] = []
        while (moment := self.next_event()) <= now:
            if moment == self._leap.end:
                self._finish_leap(moment, events)
            elif self._loading and moment == self._loading[0][0]:
                self._finish_load(moment, events)
            else:
                self._expire(moment, events)
        return events

    def submit(self, now: float, job: Job) -> bool:
        """Take a job; false where it could never fit."""
        limit = self.profile.kv_blocks
        total = job.prompt_tokens + job.output_tokens
        # The last token's KV is never needed.
        if total > self.profile.max_model_len or (limit is not None and self.profile.blocks(total - 1) > limit):
            return False
        job.goal = job.prompt_tokens
        self._waiting.append(job)
        self._changed(now)
        return True

    def claim(self, name: Hashable) -> bool:
        """Hear that a decode holds the request and will fetch its KV; false where it is gone."""
        return self._leases.claim(name)

    def release(self, now: float, name: Hashable) -> None:
        """Free the KV that was kept for a decode: it was fetched, or won't be."""
        job = self._leases.take(name)
        if job is not None:
            self._free(job)
            self._changed(now)

    def cancel(self, now: float, job: Job) -> None:
        """Stop a job whose client left; nothing more is told of it, but for the KV that it is fetching."""
        job.gone = True
        if job in self._decoding:
            self._cut(now)
            job.last_step = self._step + self._leap.steps
            self._push(self._finishing, job.last_step, job)
            return
        if job in self._waiting:
            self._waiting.remove(job)
        elif job in self._loaded:
            self._loaded.remove(job)
        elif job in self._prefilling:
            self._prefilling.remove(job)
        else:
            return  # over, or fetching: `_finish_load` frees it
        self._free(job)
        self._changed(now)

    # Steps.

    def _changed(self, now: float) -> None:
        """Begin a step where none is under way, else see that the next begins as early as it can."""
        self._fetch(now)
        if not self._leap.active:
            self._begin_leap(now)
        elif self.running < self.profile.max_num_seqs and (self._waiting or self._loaded):
            self._cut(now)

    def _begin_leap(self, now: float) -> None:
        """Choose what the next steps compute, and how many of them are alike."""
        self._take_growth(self._step)
        self._join()
        self._share_budget()
        sequences = len(self._decoding)
        if not sequences and not self._shares:
            self._leap.stop()
        else:
            self._leap.begin(now, self._alike(), sequences, self._context, self._shares)

    def _join(self) -> None:
        """Give fetched jobs a seat in the batch."""
        self._firsts = []
        while self._loaded and self.running < self.profile.max_num_seqs:
            job = self._loaded.popleft()
            self._seat(job, job.goal - 1)  # the last token is computed again, to make the first one
            self._firsts.append(job)

    def _share_budget(self) -> None:
        """Divide the step's tokens between prompts: those that have begun, then those that wait."""
        self._shares = []
        budget = self._budget - len(self._decoding)
        for job in self._prefilling:
            budget -= self._give(job, budget)
        profile = self.profile
        while self._waiting and budget > 0:
            job = self._waiting[0]
            full = len(self._prefilling) >= profile.prefill_batch or self.running >= profile.max_num_seqs
            if full or job.work is Work.PULL or not self._hold(job):
                break
            self._waiting.popleft()
            self._prefilling.append(job)
            budget -= self._give(job, budget)

    def _give(self, job: Job, budget: int) -> int:
        tokens = min(job.goal - job.computed, budget)
        if tokens > 0:
            self._shares.append((job, tokens))
        return max(0, tokens)

    def _alike(self) -> int:
        """Return how many steps are alike from here: until somebody leaves, joins or needs memory that may be short."""
        if self._every_step or self._shares or self._firsts:
            return 1
        finishing = self._finishing
        while finishing[0][2].last_step != finishing[0][0]:
            heapq.heappop(finishing)
        return self._within_memory(finishing[0][0] - self._step)

    def _within_memory(self, steps: int) -> int:
        """Return how many of these steps can be made before memory may be short."""
        free = self.cache.free
        if free is None or free >= len(self._decoding) * (steps // self.profile.block_tokens + 1):
            return steps
        return min(steps, max(1, self._growing[0][0] - self._step))

    def _cut(self, now: float) -> None:
        """End the leap with the step that is under way."""
        if self._leap.active:
            self._leap.shorten(self._leap.steps_begun(now))

    def _finish_leap(self, now: float, events: list[Event]) -> None:
        steps, sequences = self._leap.steps, len(self._decoding)
        self._take_growth(self._step + steps - 1)
        self._step += steps
        self._context += steps * sequences
        self.counts.generated_tokens += steps * sequences
        self.counts.busy_s += now - self._leap.begun
        if self._every_step:
            firsts = set(self._firsts)
            events.extend(Event(now, Told.TOKEN, job) for job in self._decoding if job not in firsts and not job.gone)
        events.extend(Event(now, Told.FIRST, job) for job in self._firsts if not job.gone)
        self._firsts = []
        self._leave(now, events)
        for job, tokens in self._shares:
            job.computed += tokens
            if job.computed >= job.goal and job in self._prefilling:
                self._prefilling.remove(job)
                self._prefilled(now, job, events)
        self._shares = []
        self._fetch(now)
        self._begin_leap(now)

    def _leave(self, now: float, events: list[Event]) -> None:
        """Let those go whose last step this was."""
        finishing = self._finishing
        while finishing and finishing[0][0] <= self._step:
            last, _, job = heapq.heappop(finishing)
            if job.last_step != last:
                continue
            self._stand_up(job)
            self._free(job)
            self._done(now, job, events)

    def _prefilled(self, now: float, job: Job, events: list[Event]) -> None:
        """Go on after a prompt's last token was computed, which makes the next one."""
        job.made += 1
        self.counts.generated_tokens += 1
        events.append(Event(now, Told.FIRST if job.made == 1 else Told.TOKEN, job))
        if job.work is Work.PREFILL:
            self._done(now, job, events)
            self._leases.keep(job, now)
        elif job.made >= job.output_tokens:
            self._free(job)
            self._done(now, job, events)
        else:
            self._seat(job, job.goal)

    def _done(self, now: float, job: Job, events: list[Event]) -> None:
        job.made = job.output_tokens
        if not job.gone:
            self.counts.done += 1
            events.append(Event(now, Told.DONE, job))

    # Seats in the batch.

    def _seat(self, job: Job, computed: int) -> None:
        self._decoding[job] = None
        job.computed, job.joined = computed, self._step
        job.last_step = self._step + job.output_tokens - job.made
        self._context += computed
        self._push(self._finishing, job.last_step, job)
        if self.profile.kv_blocks is not None:
            room = self.profile.blocks(job.goal) * self.profile.block_tokens - computed
            self._grow_at(self._step + room, job)

    def _stand_up(self, job: Job) -> None:
        """Leave the batch; `goal` is then what would have to be computed again."""
        del self._decoding[job]
        steps = self._step - job.joined
        job.made += steps
        job.computed += steps
        self._context -= job.computed
        job.goal = job.computed + 1
        job.last_step = -1

    def _push(self, heap: list[tuple[int, int, Job]], step: int, job: Job) -> None:
        self._serial += 1
        heapq.heappush(heap, (step, self._serial, job))

    # Memory.

    def _hold(self, job: Job) -> bool:
        """Take the blocks of a prompt; what is there of it need not be computed."""
        plain = self.profile.blocks(job.goal) - len(job.hashes)
        hit = self.cache.acquire(job.hashes, plain)
        if hit is None:
            return False
        job.holds, job.plain = True, plain
        job.computed = min(hit * self.profile.block_tokens, job.goal - 1)
        if not job.made:
            job.cached = job.computed
            self.counts.prompt_tokens += job.prompt_tokens
            self.counts.cached_tokens += job.cached
        return True

    def _free(self, job: Job) -> None:
        if job.holds:
            self.cache.release(job.hashes, job.plain)
            job.holds, job.plain, job.computed = False, 0, 0

    def _take_growth(self, until: int) -> None:
        """Give sequences the blocks that they need until a step, at others' cost where there are none."""
        growing = self._growing
        while growing and growing[0][0] <= until:
            step, _, job = heapq.heappop(growing)
            if job not in self._decoding or job.grows_at != step:
                continue
            while job in self._decoding and not self.cache.grow(1):
                self._preempt()
            if job in self._decoding:
                job.plain += 1
                self._grow_at(step + self.profile.block_tokens, job)

    def _grow_at(self, step: int, job: Job) -> None:
        job.grows_at = step
        self._push(self._growing, step, job)

    def _preempt(self) -> None:
        """Let the youngest give its memory back, and be computed again as soon as there is room."""
        if self._prefilling:
            job = self._prefilling.pop()
        else:
            job = next(reversed(self._decoding))
            self._stand_up(job)
            if job.work is Work.PULL:
                job.work = Work.WHOLE  # the KV that was fetched is gone, and can't be fetched twice
        self.counts.preempted += 1
        self._free(job)
        self._waiting.appendleft(job)

    # KV from and for other engines.

    def _fetch(self, now: float) -> None:
        """Begin to fetch KV for those that are first in the queue."""
        waiting = self._waiting
        if not waiting or waiting[0].work is not Work.PULL:
            return
        limited = self.profile.kv_blocks is not None and self._leap.active and self._leap.end != now
        if limited:
            self._take_growth(self._step + self._leap.steps_begun(now) - 1)
        while waiting and waiting[0].work is Work.PULL and self.running < self.profile.max_num_seqs:
            job = waiting[0]
            if not self._hold(job):
                break
            waiting.popleft()
            job.pull_tokens = job.goal - (job.computed if self.profile.pulls_cached else 0)
            job.pull_s = self.profile.transfer_s(job.pull_tokens)
            self._serial += 1
            heapq.heappush(self._loading, (now + job.pull_s, self._serial, job))
        if limited:
            self._leap.shorten(max(self._leap.steps_begun(now), self._within_memory(self._leap.steps)))

    def _finish_load(self, now: float, events: list[Event]) -> None:
        _, _, job = heapq.heappop(self._loading)
        self.counts.pulled_tokens += job.pull_tokens
        job.cached = job.prompt_tokens
        events.append(Event(now, Told.PULLED, job))
        if job.gone:
            self._free(job)
        else:
            self._loaded.append(job)
        self._changed(now)

    def _expire(self, now: float, events: list[Event]) -> None:
        job = self._leases.expire()
        self.counts.expired += 1
        self._free(job)
        events.append(Event(now, Told.EXPIRED, job))
        self._changed(now)
