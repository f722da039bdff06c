"""What is measured, and what the aim is: a table of cases, each a load and the figures that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdcluster.bench.load import Load, Seen

_US, _MS, _MB = 1e6, 1e3, 1e-6


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load on one router: what came, CPU seconds of the router's processes, their resident bytes at the most."""

    seen: Seen
    cpu: float
    resident: int
    pace: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a case. `target` is the aim for ours / peer, `most` for ours alone; None for no aim.

    With `most` there is no ratio: such a figure is mostly the noise of the harness, which the bare relay shows.
    """

    name: str
    unit: str
    of: Callable[[Measurement], float]
    target: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A load and its figures. `beside` is put on at the same time and not measured; `floor`: also on a bare relay."""

    name: str
    load: Load
    figures: tuple[Figure, ...]
    beside: Load | None = None
    floor: bool = False


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of them lies, 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _per_event(measured: Measurement) -> float:
    return _US * measured.cpu / max(1, measured.seen.events)


def _per_request(measured: Measurement) -> float:
    return _US * measured.cpu / max(1, measured.seen.requests)


def _resident(measured: Measurement) -> float:
    return _MB * measured.resident


def _first_p50(measured: Measurement) -> float:
    return _MS * percentile(measured.seen.first, 0.5)


def _first_p99(measured: Measurement) -> float:
    return _MS * percentile(measured.seen.first, 0.99)


def _longest_wait(measured: Measurement) -> float:
    return _MS * max(measured.seen.gaps, default=0.0) - measured.pace


CASES: tuple[Case, ...] = (
    Case(
        "paced",
        Load(port=0, concurrency=128, requests=640, tokens=64, pace=20, warm_up=128),
        (
            Figure("CPU a chunk, one each 20 ms, 128 streams", "us", _per_event, target=0.85),
            Figure("resident memory at 128 streams", "MB", _resident, target=0.7),
        ),
        floor=True,
    ),
    Case(
        "burst",
        Load(port=0, concurrency=32, requests=2400, tokens=64),
        (
            Figure("CPU a stream of 64 events in a burst", "us", _per_request, target=0.95),
            Figure("TTFT p50, 32 at once", "ms", _first_p50, target=1.0),
            Figure("TTFT p99, 32 at once", "ms", _first_p99, target=1.0),
        ),
        floor=True,
    ),
    Case(
        "plain",
        Load(port=0, concurrency=32, requests=6000, tokens=4, stream=False),
        (Figure("CPU a request that is not streamed", "us", _per_request, target=1.0),),
    ),
    Case(
        "large",
        Load(port=0, concurrency=16, requests=1000, tokens=4, stream=False, prompt=400_000),
        (Figure("CPU a request with a prompt of 400 kB", "us", _per_request, target=0.75),),
    ),
    Case(
        "giant",
        Load(port=0, concurrency=16, requests=64, tokens=100, pace=20, warm_up=16),
        (Figure("longest wait of 16 streams beside prompts of 5 MB", "ms", _longest_wait, most=25.0),),
        beside=Load(port=0, concurrency=1, requests=14, tokens=1, stream=False, prompt=5_000_000, pause=0.4, warm_up=1),
        floor=True,
    ),
)


def scaled(case: Case, share: float) -> Case:
    """Return a case with fewer requests, each client still with one at least."""
    load = case.load
    return replace(case, load=replace(load, requests=max(load.concurrency, round(load.requests * share))))
