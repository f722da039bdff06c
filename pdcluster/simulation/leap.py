"""Steps of an engine that are alike, made in one go, and cut short when something comes in between. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdcluster.simulation.job import Job
from pdcluster.simulation.profile import EngineProfile


class Leap:
    """The steps under way: since when, how many, until when (infinity: none are)."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self._sequences = 0
        self._context = 0
        self._shares: Sequence[tuple[Job, int]] = ()
        self.begun = 0.0
        self.steps = 0
        self.end = math.inf

    @property
    def active(self) -> bool:
        """Tell whether there are steps under way."""
        return self.end != math.inf

    def begin(self, now: float, steps: int, sequences: int, context: int, shares: Sequence[tuple[Job, int]]) -> None:
        """Begin steps of so many sequences with so much context in all, and parts of prompts (in one step only)."""
        self._sequences, self._context, self._shares = sequences, context, shares
        self.begun, self.steps = now, steps
        self.end = now + self._seconds(steps)

    def stop(self) -> None:
        """Let no steps be under way."""
        self.end = math.inf

    def shorten(self, steps: int) -> None:
        """Make no more than so many steps."""
        if steps < self.steps:
            self.steps = steps
            self.end = self.begun + self._seconds(steps)

    def steps_begun(self, now: float) -> int:
        """Return how many of the steps have begun, at least one; one whose beginning this is has not."""
        if not self.active or self.steps == 1:
            return self.steps
        elapsed = now - self.begun
        steps = max(1, min(self.steps, self._steps_in(elapsed)))
        while steps < self.steps and self._seconds(steps) < elapsed:
            steps += 1
        while steps > 1 and self._seconds(steps - 1) >= elapsed:
            steps -= 1
        return steps

    def _seconds(self, steps: int) -> float:
        profile = self._profile
        seconds = profile.decode_s(self._sequences, self._context, steps)
        if self._shares:
            seconds += profile.prefill_base_s
            for job, tokens in self._shares:
                seconds += profile.prefill_s(tokens, job.computed)
        return seconds

    def _steps_in(self, elapsed: float) -> int:
        """Return about how many steps a time holds: the root of what `EngineProfile.decode_s` says."""
        profile, sequences = self._profile, self._sequences
        square = 0.5 * profile.decode_token_s * sequences
        each = profile.decode_s(sequences, self._context) - square
        if square > 0.0:
            return math.ceil((math.sqrt(each * each + 4.0 * square * elapsed) - each) / (2.0 * square))
        return math.ceil(elapsed / each) if each > 0.0 else self.steps
