"""What the supervisor knows of each program that it started: phase, health, restarts."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster.backends.base import Handle
from pdcluster.plan import Instance, Program
from pdcluster.state import ProcessPhase, ProcessRecord

_LONGEST_BACKOFF_S = 60.0
_STEADY_S = 60.0


@dataclass(slots=True)
class Tracked:
    """One program and its life so far; times are the supervisor's monotonic clock, in seconds."""

    program: Program
    handle: Handle | None = None
    phase: ProcessPhase = "starting"
    restarts: int = 0
    healthy_since: float | None = None
    retry_at: float | None = None
    exit_code: int | None = None

    @property
    def name(self) -> str:
        """The program's name."""
        return self.program.name

    @property
    def role(self) -> str:
        """The pool's role, "proxy" for the proxy."""
        return self.program.role if isinstance(self.program, Instance) else "proxy"

    def died(self, code: int, now: float, limit: int) -> None:
        """Note a death: restart after a back-off that doubles, or stay down after `limit` in a row."""
        if self.healthy_since is not None and now - self.healthy_since >= _STEADY_S:
            self.restarts = 0
        self.exit_code = code
        self.handle = None
        self.healthy_since = None
        if self.restarts >= limit:
            self.phase = "failed"
            self.retry_at = None
            return
        self.phase = "restarting"
        self.retry_at = now + min(_LONGEST_BACKOFF_S, 2.0**self.restarts)
        self.restarts += 1

    def record(self) -> ProcessRecord:
        """Return what cluster.json keeps."""
        return ProcessRecord(
            name=self.name,
            role=self.role,
            url=self.program.url,
            phase=self.phase,
            pid=self.handle.pid if self.handle else None,
            started=self.handle.started if self.handle else None,
            restarts=self.restarts,
            exit_code=self.exit_code,
        )
