"""Run the cases, routers in turn, as often as asked; what comes back is checked before it counts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from pdcluster.bench.cases import Case, Measurement
from pdcluster.bench.load import Load, Seen
from pdcluster.bench.routers import (
    Ports,
    Router,
    free_ports,
    start_ours,
    start_stand_ins,
    start_tcp_relay,
    start_vllm_router,
    stop,
)
from pdcluster.errors import LaunchError

_LOOK_EVERY_S = 0.2
_LONGEST_S = 300.0
_WARM_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One case on one router in one round."""

    case: str
    router: str
    measurement: Measurement


def run_all(cases: Sequence[Case], rounds: int, workers: int, say: Callable[[str], None], *, peer: bool) -> list[Run]:
    """Run every case on ours, the peer and where it makes sense the bare relay, interleaved, `rounds` times."""
    numbers = free_ports(7)
    ports = Ports(tuple(numbers[:2]), tuple(numbers[2:6]), numbers[6])
    runs: list[Run] = []
    with ExitStack() as stack:
        stack.callback(stop, start_stand_ins(ports))

        def until_the_end(router: Router) -> Router:
            stack.callback(router.stop)  # at once: the next one may not come up
            return router

        routers = [until_the_end(start_ours(ports, workers))]
        if peer:
            routers.append(until_the_end(start_vllm_router(ports)))
        relay = until_the_end(start_tcp_relay(ports))
        for number in range(rounds):
            for case in cases:
                for router in [*routers, *([relay] if case.floor else [])]:
                    say(f"round {number + 1} of {rounds}: {case.name} on {router.name}")
                    runs.append(Run(case.name, router.name, measure(case, router)))
        _refuse_breaches(ports)
    return runs


def measure(case: Case, router: Router) -> Measurement:
    """Put a case's load on a router; raises `LaunchError` where an answer was wrong."""
    with ExitStack() as stack:
        reader = stack.enter_context(ThreadPoolExecutor())
        loads = [load for load in (case.load, case.beside) if load is not None]
        processes = [_started(load, router, stack) for load in loads]
        _await_warm(case, router, [reader.submit(_line, process) for process in processes])
        before, resident = router.cpu_seconds(), 0
        lines = [_go(process, reader) for process in processes]
        deadline = time.monotonic() + _LONGEST_S
        while not lines[0].done():
            resident = max(resident, router.resident_bytes())
            _refuse_late(case, router, deadline)
            time.sleep(_LOOK_EVERY_S)
        spent = router.cpu_seconds() - before
        while not all(line.done() for line in lines):
            _refuse_late(case, router, deadline)
            time.sleep(_LOOK_EVERY_S)
        seen = [_seen(line.result(), case, router) for line in lines]
    return Measurement(seen[0], spent, resident, case.load.pace)


def _await_warm(case: Case, router: Router, lines: Sequence[Future[str]]) -> None:
    """Wait until every load has warmed its router up; all of them together have `_WARM_S`."""
    _, late = wait(lines, _WARM_S)
    if late:
        raise LaunchError(f"{router.name} was not warm within {_WARM_S:g} s in {case.name}; is this machine busy?")
    if not all(line.result() for line in lines):
        raise LaunchError("the load generator died; run the same command again")


def _refuse_late(case: Case, router: Router, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise LaunchError(f"{case.name} on {router.name} was not done within {_LONGEST_S:g} s")


def _started(load: Load, router: Router, stack: ExitStack) -> subprocess.Popen[str]:
    told = json.dumps(asdict(replace(load, port=router.port, key=router.key)))
    process = subprocess.Popen(
        [sys.executable, "-m", "pdcluster.bench.load", told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline() if process.stdout is not None else ""


def _go(process: subprocess.Popen[str], reader: ThreadPoolExecutor) -> Future[str]:
    """Let a load begin; what it prints is read as it comes, since a pipe holds little."""
    if process.stdin is not None:
        process.stdin.write("\n")
        process.stdin.flush()
    return reader.submit(_line, process)


def _seen(line: str, case: Case, router: Router) -> Seen:
    if not line:
        raise LaunchError("the load generator died; run the same command again")
    seen = Seen(**json.loads(line))
    if seen.wrong:
        raise LaunchError(f"{router.name} answered wrongly in {case.name}: {seen.wrong}")
    return seen


def _refuse_breaches(ports: Ports) -> None:
    """Raise where a router broke the protocol: then its figures are those of another job."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ports.prefill[0]}/breaches", timeout=10) as reply:
        told = json.loads(reply.read())
    if told["breaches"]:
        raise LaunchError(f"the routers broke the prefill/decode protocol: {told['breaches']}")


def routers_of(runs: Iterable[Run]) -> list[str]:
    """Return the routers' names in the order in which they ran first."""
    return list(dict.fromkeys(run.router for run in runs))
