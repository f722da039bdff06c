"""Several processes on one port: forked from one that serves nothing, begun again when they die, ended together.

They share the listening socket, so that a connection waits for whichever is free and a dead worker takes only its own
with it, and a table of counts, so that each places requests by the load of all.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from proxy.shared_counts import SharedCounts

_LOG = logging.getLogger("proxy.workers")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_SHORT_LIFE_S = 2.0
_LAST_SECONDS = 5.0


class Workers:
    """`run` is what a worker does, by its row in the counts; it must not return before the worker is to end."""

    def __init__(self, counts: SharedCounts, run: Callable[[], None], grace: float) -> None:
        self._counts = counts
        self._run = run
        self._grace = grace
        self._rows: dict[int, int] = {}  # process id -> row
        self._born: dict[int, float] = {}
        self._stopping: float | None = None

    def serve(self) -> None:
        """Keep all workers alive until a signal, then end them and wait."""
        signal.pthread_sigmask(signal.SIG_BLOCK, (*_SIGNALS, signal.SIGCHLD))
        for row in range(self._counts.rows):
            self._fork(row)
        while self._rows:
            got = signal.sigtimedwait((*_SIGNALS, signal.SIGCHLD), 0.5)
            if got is not None and got.si_signo in _SIGNALS:
                self._stop()
            self._reap()
            if self._stopping is not None and time.monotonic() > self._stopping:
                self._send(signal.SIGKILL)

    def _fork(self, row: int) -> None:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            self._be_worker(row, parent)
        self._rows[child] = row
        self._born[child] = time.monotonic()

    def _be_worker(self, row: int, parent: int) -> NoReturn:
        """Serve in the new process; it ends with its parent, however that goes."""
        code = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C goes to the parent, which asks each worker once
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_SIGNALS, signal.SIGCHLD))
            if os.getppid() == parent:
                self._counts.take_row(row)
                self._run()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except KeyboardInterrupt:
            code = 130
        except Exception:  # noqa: BLE001 - the process ends with it
            _LOG.exception("worker %d failed", row)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._rows:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            row = self._rows.pop(child)
            lived = time.monotonic() - self._born.pop(child)
            self._counts.clear(row)
            if self._stopping is not None:
                continue
            code = os.waitstatus_to_exitcode(status)
            _LOG.warning("worker %d (pid %d) ended with %d; another one takes its place", row, child, code)
            if lived < _SHORT_LIFE_S:
                time.sleep(0.5)  # one that cannot live must not be born a hundred times a second
            self._fork(row)

    def _stop(self) -> None:
        """Ask all workers to end; the second time they do so at once."""
        if self._stopping is None:
            self._stopping = time.monotonic() + self._grace + _LAST_SECONDS
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for child in self._rows:
            os.kill(child, number)
