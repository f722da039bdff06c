"""Processes on this machine, each the leader of its own session, with its log in the run directory."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from pdcluster import processes
from pdcluster.backends.base import Handle
from pdcluster.errors import LaunchError
from pdcluster.log_follow import tail
from pdcluster.plan import Program
from pdcluster.state import RunDirectory


class LocalBackend:
    """Starts programs with subprocess; `environment` is the launcher's own, of which each program inherits its part."""

    def __init__(self, directory: RunDirectory, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = dict(environment)
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, program: Program) -> Handle:
        """Start a program in the run directory; its output is appended to its log."""
        try:
            with self._directory.log(program.name).open("ab") as log:
                child = subprocess.Popen(
                    program.argv,
                    env=program.full_environment(self._environment),
                    cwd=self._directory.path,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"{program.name}: cannot start {program.argv[0]}: {error.strerror}") from error
        self._children[child.pid] = child
        return Handle(program.name, child.pid, processes.start_time(child.pid) or 0.0)

    def poll(self, handle: Handle) -> int | None:
        """Return the exit code, None while it runs."""
        return self._children[handle.pid].poll()

    def terminate(self, handles: Sequence[Handle]) -> None:
        """SIGTERM to the programs that still run."""
        processes.terminate(_sessions(handles))

    def kill(self, handles: Sequence[Handle]) -> None:
        """SIGKILL to every member of the sessions; the children are reaped."""
        processes.kill(_sessions(handles))
        for handle in handles:
            self._children[handle.pid].wait(timeout=10)

    def logs(self, name: str, lines: int) -> list[str]:
        """Return the last lines of a log."""
        return tail(self._directory.log(name), lines)[0]


def _sessions(handles: Sequence[Handle]) -> list[processes.Session]:
    return [processes.Session(handle.pid, handle.started) for handle in handles]
