"""Every error that pdcluster raises on purpose, with the exit code that the command line gives it.

    PdclusterError           1   something failed while running
    ├── UserError            2   what was asked for cannot be done; the message says what, where, what to do
    │   ├── SpecError        2   the cluster spec is wrong; holds every problem, not the first
    │   └── PlanError        2   the spec is right but this host cannot carry it
    ├── LaunchError          1   an engine or the proxy did not come up
    └── StateError           2   there is no such cluster, or another launcher holds it

Exit codes besides these: 0 done, 3 a bug (with a request to report it), 130 Ctrl-C.
"""

from __future__ import annotations

from dataclasses import dataclass


class PdclusterError(Exception):
    """Something failed while running; the message is one line for a person."""

    exit_code = 1


class UserError(PdclusterError):
    """What was asked for cannot be done; the message says what, where and what to do."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a spec: where (key path), what, and what to do about it."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        """Render as one line."""
        return f"{self.where}: {self.what}" + (f" ({self.fix})" if self.fix else "")


class SpecError(UserError):
    """The cluster spec is wrong; `problems` has every fault found, each with its key path."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class PlanError(UserError):
    """The spec is valid but this host cannot carry it (devices, memory, ports)."""


class LaunchError(PdclusterError):
    """An engine or the proxy did not come up; everything that was started has been stopped."""


class StateError(UserError):
    """No such cluster in the run directory, or another launcher already runs it."""
