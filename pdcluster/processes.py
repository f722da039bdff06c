"""Find and end the processes of a cluster by the session they belong to.

Each program is started as the leader of a session of its own, and what it starts stays in that session, so the
session's id finds the children of a leader that is long dead. (A mark in the environment would not do: engines
overwrite theirs when they set their process title.)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

_TOLERANCE_S = 1.0  # the kernel's start times are rounded to clock ticks


@dataclass(frozen=True, slots=True)
class Session:
    """A session: its leader's process id and that leader's start time in seconds since the epoch."""

    leader: int
    started: float


def start_time(pid: int) -> float | None:
    """Return a process's start time, None if there is no such process."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def is_running(pid: int | None, started: float | None) -> bool:
    """Tell whether that very process (not a later one with its id) runs."""
    if pid is None or started is None:
        return False
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < _TOLERANCE_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def members(sessions: Iterable[Session]) -> list[psutil.Process]:
    """Return every live process of these sessions; a session whose id was taken over by another leader has none."""
    wanted = {session.leader for session in sessions if not _taken_over(session)}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) in wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def terminate(sessions: Iterable[Session]) -> None:
    """SIGTERM to the leaders alone: an engine ends its own workers, and one signalled as well dies mid-way."""
    for session in sessions:
        if is_running(session.leader, session.started):
            with suppress(ProcessLookupError):
                os.kill(session.leader, signal.SIGTERM)


def end(sessions: Sequence[Session], grace: float) -> int:
    """Terminate, wait up to `grace` seconds, kill what is left; returns how many had to be killed."""
    terminate(sessions)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        if not any(is_running(session.leader, session.started) for session in sessions):
            break
        time.sleep(0.1)
    return kill(sessions)


def kill_one(session: Session) -> None:
    """SIGKILL to a leader that doesn't lead a session of its own, such as a launcher in a terminal."""
    if is_running(session.leader, session.started):
        with suppress(ProcessLookupError):
            os.kill(session.leader, signal.SIGKILL)


def kill(sessions: Sequence[Session]) -> int:
    """SIGKILL to every member, again until none is left; returns how many there were at first."""
    first = len(left := members(sessions))
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=2)
        left = members(sessions)
    return first


def _taken_over(session: Session) -> bool:
    current = start_time(session.leader)
    return current is not None and abs(current - session.started) >= _TOLERANCE_S
