"""Start a plan, wait until it is ready, keep it running, and stop it in order.

Signals only queue; one loop handles them, then looks at every process. Slow work (pair checks) runs aside in a
thread, so that Ctrl-C is answered at any time.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import httpx

from pdcluster.backends.base import Backend
from pdcluster.diagnosis import describe_exit, explain_death
from pdcluster.errors import LaunchError
from pdcluster.pair_check import Engine, PairResult, pair_rounds
from pdcluster.plan import Plan, plan_proxy, proxy_probe_url
from pdcluster.spec_loading import LoadedSpec
from pdcluster.state import ClusterRecord, RunDirectory
from pdcluster.tracking import Tracked
from pdcluster.warmup import WarmUp

T = TypeVar("T")

_TICK_S = 0.2
_PROBE_EVERY_S = 1.0
_PROXY_READY_S = 60.0
_EXTRA_STOP_S = 5.0  # engines get this much longer than their own shutdown timeout
_LOG_LINES = 200


class Reporter(Protocol):
    """Shows a person what happens."""

    def update(self, record: ClusterRecord) -> None:
        """Show the current state; called at every change and about once a second."""
        ...

    def note(self, text: str) -> None:
        """Show one line that stays."""
        ...


class StopRequestedError(Exception):
    """A signal asked for an ordered stop."""


class Supervisor:
    """Runs one plan; `warm_up` makes the pair checks."""

    def __init__(
        self,
        loaded: LoadedSpec,
        plan: Plan,
        record: ClusterRecord,
        directory: RunDirectory,
        backend: Backend,
        warm_up: WarmUp,
        client: httpx.Client,
        reporter: Reporter,
    ) -> None:
        self._loaded = loaded
        self._launch = loaded.spec.launch
        self._plan = plan
        self._record = record
        self._directory = directory
        self._backend = backend
        self._warm_up = warm_up
        self._client = client
        self._reporter = reporter
        self._signals: deque[int] = deque()
        self._engines = {instance.name: Tracked(instance) for instance in plan.instances}
        self._proxy = Tracked(plan.proxy)
        self._aside = ThreadPoolExecutor(thread_name_prefix="pair-check")
        self._rechecks: dict[str, Future[list[PairResult]]] = {}
        self._last_probe = float("-inf")

    def run(self) -> None:
        """Serve until a signal; raises `LaunchError` where the cluster did not come up. Nothing is left running."""
        with self._queued_signals():
            try:
                self._start_engines()
                self._wait_for_engines()
                self._check_all_pairs()
                self._start_proxy()
                while True:
                    self._watch()
            except StopRequestedError:
                self._reporter.note("stopping: new requests are refused, running streams may end")
                self._save(phase="stopping")
                self._stop()
                self._save(phase="stopped")
            except BaseException as error:
                self._stop_at_once()
                self._save(phase="failed", message=str(error), exit_code=getattr(error, "exit_code", 3))
                raise
            finally:
                self._aside.shutdown(wait=False, cancel_futures=True)

    def _start_engines(self) -> None:
        self._save(phase="starting")
        for tracked in self._engines.values():
            self._tick(wait=False)
            tracked.handle = self._backend.start(tracked.program)
            self._save()

    def _wait_for_engines(self) -> None:
        deadline = time.monotonic() + self._launch.ready_timeout
        while waiting := [tracked for tracked in self._engines.values() if tracked.phase != "healthy"]:
            self._tick()
            self._refuse_death(self._engines.values())
            if self._probe_due():
                for tracked in waiting:
                    self._mark_if_healthy(tracked)
                self._save()
            if time.monotonic() > deadline:
                names = ", ".join(tracked.name for tracked in waiting)
                raise LaunchError(
                    f"{names}: not healthy after {self._launch.ready_timeout:g} s (launch.ready_timeout); "
                    f"the logs are in {self._directory.logs}"
                )

    def _check_all_pairs(self) -> None:
        """Warm all pairs up; exclude those that diverge, and fail where none is left."""
        self._save(phase="warming")
        prefills, decodes = (self._as_engines(role) for role in ("prefill", "decode"))
        results = self._run_aside(lambda: self._warm_up.check(pair_rounds(prefills, decodes)))
        bad = [result for result in results if not result.ok]
        for result in bad:
            self._reporter.note(f"pair {result.prefill} -> {result.decode} is not put in service: {result.detail}")
        if len(bad) == len(results):
            raise LaunchError(
                f"no prefill x decode pair works: {bad[0].detail}; the logs are in {self._directory.logs}"
            )
        moved = sum(result.kv_bytes for result in results)
        self._reporter.note(
            f"{len(results) - len(bad)} of {len(results)} pairs checked: greedy answers equal the aggregated ones, "
            f"{moved:,} bytes of KV moved over NIXL"
        )
        excluded = tuple((result.prefill, result.decode) for result in bad)
        self._record = replace(self._record, excluded_pairs=excluded)

    def _start_proxy(self) -> None:
        self._proxy.program = plan_proxy(
            self._loaded, self._plan.instances, self._plan.proxy.argv[0], self._record.excluded_pairs
        )
        self._proxy.handle = self._backend.start(self._proxy.program)
        deadline = time.monotonic() + _PROXY_READY_S
        while self._proxy.phase != "healthy":
            self._tick()
            self._refuse_death([*self._engines.values(), self._proxy])
            self._mark_if_healthy(self._proxy)
            if time.monotonic() > deadline:
                log = self._directory.log("proxy")
                raise LaunchError(f"proxy: not ready after {_PROXY_READY_S:g} s; its log is {log}")
        self._save(phase="ready")

    def _watch(self) -> None:
        """One round of the steady state: deaths, due restarts, and health of what is coming back."""
        self._tick()
        for tracked in (*self._engines.values(), self._proxy):
            self._note_death(tracked)
            if tracked.phase == "restarting" and tracked.retry_at is not None and time.monotonic() >= tracked.retry_at:
                tracked.retry_at = None
                tracked.handle = self._backend.start(tracked.program)
                self._save()
        if self._probe_due():
            for tracked in (*self._engines.values(), self._proxy):
                if tracked.phase == "restarting" and tracked.handle is not None and tracked.name not in self._rechecks:
                    self._readmit(tracked)
            self._finish_rechecks()

    def _readmit(self, tracked: Tracked) -> None:
        """Check a restarted engine against its partners before it counts as healthy; the proxy needs no check."""
        if not self._answers(tracked):
            return
        if tracked is self._proxy:
            self._mark_if_healthy(tracked)
            self._save()
            return
        prefills = [tracked] if tracked.role == "prefill" else self._healthy("prefill")
        decodes = [tracked] if tracked.role == "decode" else self._healthy("decode")
        rounds = pair_rounds([_engine(item) for item in prefills], [_engine(item) for item in decodes])
        self._rechecks[tracked.name] = self._aside.submit(self._warm_up.check, rounds)

    def _finish_rechecks(self) -> None:
        for name in [name for name, future in self._rechecks.items() if future.done()]:
            results = self._rechecks.pop(name).result()
            tracked = self._engines[name]
            if tracked.handle is None:
                continue  # it died meanwhile; the next restart checks again
            bad = [result for result in results if not result.ok]
            if bad:
                self._reporter.note(
                    f"{name} came back but {bad[0].prefill} -> {bad[0].decode}: {bad[0].detail}; stopped"
                )
                self._backend.kill([tracked.handle])
                tracked.died(self._backend.poll(tracked.handle) or 0, time.monotonic(), self._launch.restart_limit)
            else:
                self._mark_if_healthy(tracked)
                self._reporter.note(f"{name} is back in service")
            self._save()

    def _note_death(self, tracked: Tracked) -> None:
        if tracked.handle is None or (code := self._backend.poll(tracked.handle)) is None:
            return
        self._backend.kill([tracked.handle])
        tracked.died(code, time.monotonic(), self._launch.restart_limit)
        if tracked.phase == "failed":
            self._reporter.note(
                f"{tracked.name} ended ({describe_exit(code)}) and stays down after {tracked.restarts} restarts; "
                f"its log is {self._directory.log(tracked.name)}"
            )
        else:
            self._reporter.note(f"{tracked.name} ended ({describe_exit(code)}); restart {tracked.restarts}")
        self._save()

    def _stop(self) -> None:
        """End the proxy first, so that streams end while their engines still run; a second signal kills."""
        for group in ([self._proxy], list(self._engines.values())):
            handles = [tracked.handle for tracked in group if tracked.handle is not None]
            self._backend.terminate(handles)
            deadline = time.monotonic() + self._launch.stop_grace + _EXTRA_STOP_S
            while any(self._backend.poll(handle) is None for handle in handles) and time.monotonic() < deadline:
                if self._signals:
                    self._reporter.note("second signal: killing what is left")
                    self._stop_at_once()
                    return
                time.sleep(_TICK_S / 2)
            self._backend.kill(handles)
            self._mark_stopped(group)

    def _stop_at_once(self) -> None:
        group = [self._proxy, *self._engines.values()]
        self._backend.kill([tracked.handle for tracked in group if tracked.handle is not None])
        self._mark_stopped(group)

    def _mark_stopped(self, group: Iterable[Tracked]) -> None:
        for tracked in group:
            tracked.phase = "stopped"
            tracked.handle = None

    def _refuse_death(self, group: Iterable[Tracked]) -> None:
        """Before the cluster is ready, one death fails the launch."""
        for tracked in group:
            code = self._backend.poll(tracked.handle) if tracked.handle is not None else None
            if code is not None:
                log = str(self._directory.log(tracked.name))
                raise LaunchError(explain_death(tracked.name, code, self._backend.logs(tracked.name, _LOG_LINES), log))

    def _mark_if_healthy(self, tracked: Tracked) -> None:
        if self._answers(tracked):
            tracked.phase = "healthy"
            tracked.healthy_since = time.monotonic()

    def _answers(self, tracked: Tracked) -> bool:
        url = tracked.program.url + "/health"
        if tracked is self._proxy:
            path = "/health" if self._record.phase == "ready" else "/ready"
            url = proxy_probe_url(self._loaded.spec.proxy) + path
        try:
            return self._client.get(url).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _probe_due(self) -> bool:
        now = time.monotonic()
        if now - self._last_probe < _PROBE_EVERY_S:
            return False
        self._last_probe = now
        return True

    def _tick(self, *, wait: bool = True) -> None:
        if self._signals:
            self._signals.clear()
            raise StopRequestedError
        if wait:
            time.sleep(_TICK_S)

    def _run_aside(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread while signals are heard and deaths are seen."""
        future = self._aside.submit(work)
        while not future.done():
            self._tick()
            self._refuse_death(self._engines.values())
            if self._probe_due():
                self._reporter.update(self._record)
        return future.result()

    def _healthy(self, role: str) -> list[Tracked]:
        return [item for item in self._engines.values() if item.role == role and item.phase == "healthy"]

    def _as_engines(self, role: str) -> list[Engine]:
        return [_engine(tracked) for tracked in self._engines.values() if tracked.role == role]

    def _save(self, **changes: object) -> None:
        record = replace(self._record, **changes)  # type: ignore[arg-type] # the callers name fields of the record
        for tracked in (*self._engines.values(), self._proxy):
            record = record.with_process(tracked.record())
        self._record = record
        self._directory.write(record)
        self._reporter.update(record)

    @contextmanager
    def _queued_signals(self) -> Iterator[None]:
        """Queue SIGINT, SIGTERM and SIGHUP while the cluster runs."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = [signal.signal(number, lambda received, _: self._signals.append(received)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)


def _engine(tracked: Tracked) -> Engine:
    return Engine(tracked.name, tracked.program.url)
