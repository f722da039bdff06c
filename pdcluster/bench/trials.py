"""One trial: fresh simulated engines, one router, the trace at one speed with one seed; none runs twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from pdcluster.bench.contestants import Contestant
from pdcluster.bench.routers import Ports, Router, free_ports
from pdcluster.bench.simulated import Engines, Served, Slow, start_engines
from pdcluster.errors import LaunchError
from pdcluster.replay.driver import Limits, Record
from pdcluster.replay.exchange import parse_target
from pdcluster.replay.figures import Figures, Targets, make_figures
from pdcluster.replay.prompts import Prompts
from pdcluster.replay.replaying import Asking, Replay, run_replay
from pdcluster.replay.report import Known, conditions
from pdcluster.replay.trace import Shape, Trace, shaped

SEED_CHANGES = (
    "order of requests that have one timestamp (0: the file's), words of prompts, "
    "order in which the router is told its engines"
)
_SAY_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all trials have in common; `timeout` is seconds a request."""

    trace: Trace
    shape: Shape
    targets: Targets
    program: Path
    prefill: int
    decode: int
    timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """What a trial varies."""

    contestant: str
    speed: float
    seed: int
    slow: Slow | None = None

    def __str__(self) -> str:
        slow = f", one engine slow ({self.slow})" if self.slow else ""
        return f"{self.contestant} at speed {self.speed:g}, seed {self.seed}{slow}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a case.

    `served` is what the engines say, `router_us` the router's CPU microseconds a request, `engines_core` the share of a
    core that the engines' process took: near 1, the figures are those of a machine too small for them. `others_cores`
    is how many cores everything else on this machine took meanwhile, which no comparison should share. `rest` are the
    figures without as many of the slowest requests as the slow engine served, None where no engine is slow.
    """

    case: Case
    ours: bool
    figures: Figures
    served: Served
    router_us: float
    router_mb: float
    engines_core: float
    others_cores: float
    rest: Figures | None
    conditions: dict[str, Any]


class Trials:
    """Runs cases, each once; `done` has all of them, in order."""

    def __init__(self, setting: Setting, say: Callable[[str], None], kept: Callable[[Trial], None]) -> None:
        self._setting = setting
        self._say = say
        self._kept = kept
        self.done: dict[Case, Trial] = {}

    def get(self, contestant: Contestant, case: Case) -> Trial:
        """Return the trial of a case, running it where it has not run yet."""
        if case not in self.done:
            self.done[case] = trial = run_trial(self._setting, contestant, case, self._say)
            self._kept(trial)
        return self.done[case]


def run_trial(setting: Setting, contestant: Contestant, case: Case, say: Callable[[str], None]) -> Trial:
    """Run a case; whatever happens, engines and router are ended. Raises `LaunchError` where either dies."""
    numbers = free_ports(setting.prefill + setting.decode)
    ports = Ports(tuple(numbers[: setting.prefill]), tuple(numbers[setting.prefill :]), 0)
    shape = replace(setting.shape, speed=case.speed, seed=case.seed)
    schedule = shaped(setting.trace, shape)
    with ExitStack() as stack:
        engines = start_engines(setting.program, ports, case.slow)
        stack.callback(engines.stop)
        router = contestant.start(shuffled(ports, case.seed))
        stack.callback(router.stop)
        target = parse_target(f"http://127.0.0.1:{router.port}", router.key or None)
        how = Replay(target, Asking("m"), Prompts(case.seed), Limits(setting.timeout, whole_output=True))
        before = router.cpu_seconds(), engines.cpu_seconds(), _machine_seconds()
        run = run_replay(how, schedule, lambda text: say(f"  {text}"), _SAY_EVERY_S)
        _refuse_the_dead(engines, router)
        after = router.cpu_seconds(), engines.cpu_seconds(), _machine_seconds()
        served, resident = engines.served(), router.resident_bytes()
    router_cpu, engine_cpu, machine = (late - early for late, early in zip(after, before, strict=True))
    found = make_figures(run, setting.targets)
    known = Known(contestant.version, cache_state="empty: engines and router are started for each run")
    return Trial(
        case=case,
        ours=contestant.ours,
        figures=found,
        served=served,
        router_us=1e6 * router_cpu / max(1, found.requests),
        router_mb=resident / 1e6,
        engines_core=engine_cpu / max(run.seconds, 1e-9),
        others_cores=max(0.0, machine - router_cpu - engine_cpu - run.cpu_seconds) / max(run.seconds, 1e-9),
        rest=None
        if case.slow is None
        else make_figures(replace(run, records=without_slowest(run.records, case.slow, served)), setting.targets),
        conditions=conditions(known, setting.trace, shape, schedule, how, found) | {"seed_changes": SEED_CHANGES},
    )


def shuffled(ports: Ports, seed: int) -> Ports:
    """Return the ports in an order that the seed chooses: ties between engines fall otherwise."""
    rng = random.Random(f"{seed} engines")  # noqa: S311 - a reproducible choice, no secret
    prefill, decode = list(ports.prefill), list(ports.decode)
    rng.shuffle(prefill)
    rng.shuffle(decode)
    return Ports(tuple(prefill), tuple(decode), ports.alone)


def without_slowest(records: tuple[Record, ...], slow: Slow, served: Served) -> tuple[Record, ...]:
    """Return the records without as many of the slowest as the slow engine served.

    Answers do not say which engine made them. A decode engine several times slower than the others makes the slowest
    TPOT of all, so for decode this is exact; for prefill, where queues blur TTFT, it is the most favourable reading.
    """
    count = (served.prefill if slow.role == "prefill" else served.decode)[0]

    def slowness(record: Record) -> float:
        value = record.ttft if slow.role == "prefill" else record.tpot
        return -1.0 if value is None else value

    ordered = sorted(records, key=slowness)
    return tuple(ordered[: max(0, len(ordered) - count)])


def _machine_seconds() -> float:
    """Return the CPU seconds that all of this machine's cores have spent so far."""
    spent = psutil.cpu_times()
    return float(sum(spent) - spent.idle - getattr(spent, "iowait", 0.0))


def _refuse_the_dead(engines: Engines, router: Router) -> None:
    if engines.process.poll() is not None:
        raise LaunchError(f"the simulated engines died during a run{engines.said()}")
    if router.process.poll() is not None:
        raise LaunchError(f"{router.name} died during a run with exit code {router.process.returncode}")
