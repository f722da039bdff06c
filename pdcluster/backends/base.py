"""The contract of a backend: it starts programs of a plan, says whether they run, and ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdcluster.plan import Program


@dataclass(frozen=True, slots=True)
class Handle:
    """A started program. `pid` leads a session of its own; `started` tells it from a later process of that id."""

    name: str
    pid: int
    started: float


class Backend(Protocol):
    """Starts and ends programs; knows nothing of roles, health or restarts."""

    def start(self, program: Program) -> Handle:
        """Start a program, its output appended to its log; raises `LaunchError` where that fails."""
        ...

    def poll(self, handle: Handle) -> int | None:
        """Return the exit code (negative: the signal), None while it runs."""
        ...

    def terminate(self, handles: Sequence[Handle]) -> None:
        """Ask programs to end; does not wait."""
        ...

    def kill(self, handles: Sequence[Handle]) -> None:
        """End programs and all their children at once, and wait until none is left."""
        ...

    def logs(self, name: str, lines: int) -> list[str]:
        """Return the last lines of a program's log."""
        ...
