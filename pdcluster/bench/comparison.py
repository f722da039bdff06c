"""Trials side by side: a row for each router and speed, ratios against the best of the peer's policies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pdcluster.bench.contestants import Contestant
from pdcluster.bench.limits import ENOUGH, Limit, Range, find_limit
from pdcluster.bench.simulated import Slow
from pdcluster.bench.trials import Case, Trial, Trials
from pdcluster.replay.figures import Figures

CLEAR = 0.05  # seeds differ by less, on a machine that is left alone


@dataclass(frozen=True, slots=True)
class Row:
    """A router at a speed over all seeds: means of shares, medians of seconds, sums of failures.

    `share_to_peer` and `ttft_p99_to_peer` are ours / the best peer's at that speed, None for peers and where the peer
    has no figure. The best peer is the policy with the highest share in target.
    """

    speed: float
    contestant: str
    ours: bool
    seeds: int
    in_target: float
    in_target_range: tuple[float, float]
    goodput: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p99: float | None
    cached_share: float | None
    failures: int
    router_us: float
    share_to_peer: float | None = None
    ttft_p99_to_peer: float | None = None


@dataclass(frozen=True, slots=True)
class SlowRow:
    """A router where one engine is slow: what part of an equal share it got, and the 99th percentile of the rest.

    That is of TPOT where decode is slow, of TTFT where prefill is, in seconds; `healthy_p99` is the same of all
    requests of the same seeds with no engine slow, `ratio` the rest's / that.
    """

    slow: str
    speed: float
    contestant: str
    ours: bool
    seeds: int
    part_of_equal_share: float
    in_target: float
    rest_p99: float | None
    healthy_p99: float | None
    ratio: float | None
    failures: int


@dataclass(frozen=True, slots=True)
class LimitRow:
    """The highest speed at which a router has enough in target; `to_peer` is ours / the best peer's."""

    contestant: str
    ours: bool
    limit: Limit
    to_peer: float | None = None


def run_grid(
    trials: Trials,
    contestants: Sequence[Contestant],
    speeds: Sequence[float],
    seeds: Sequence[int],
    slow: Slow | None = None,
) -> None:
    """Run every router at every speed with every seed, routers in turn, so that all share what the machine does."""
    for speed in speeds:
        for seed in seeds:
            for contestant in contestants:
                trials.get(contestant, Case(contestant.name, speed, seed, slow))


def make_rows(trials: Iterable[Trial]) -> list[Row]:
    """Return a row for each router and speed, in the order in which they ran."""
    healthy = [trial for trial in trials if trial.case.slow is None]
    keys = dict.fromkeys((trial.case.speed, trial.case.contestant) for trial in healthy)
    rows = [
        _row([trial for trial in healthy if (trial.case.speed, trial.case.contestant) == key])
        for key in sorted(keys, key=lambda key: key[0])
    ]
    return [_beside_peer(row, rows) for row in rows]


def make_slow_rows(trials: Iterable[Trial]) -> list[SlowRow]:
    """Return a row for each router, speed and slow engine."""
    everything = list(trials)
    keys = dict.fromkeys(
        (trial.case.slow, trial.case.speed, trial.case.contestant) for trial in everything if trial.case.slow
    )
    return [_slow_row(slow, speed, name, everything) for slow, speed, name in keys if slow is not None]


def find_limits(
    trials: Trials, contestants: Sequence[Contestant], seeds: Sequence[int], within: Range, say: Callable[[str], None]
) -> list[LimitRow]:
    """Find each router's highest speed; what the grid measured with all seeds narrows the search."""
    found: list[LimitRow] = []
    for contestant in contestants:

        def share_at(speed: float, contestant: Contestant = contestant) -> float:
            return _mean_share(trials, contestant, speed, seeds)

        known = {
            row.speed: row.in_target
            for row in make_rows(trials.done.values())
            if row.contestant == contestant.name and row.seeds == len(seeds)
        }
        limit = find_limit(share_at, within, known)
        say(f"{contestant.name}: enough in target up to {limit_text(limit)}")
        found.append(LimitRow(contestant.name, contestant.ours, limit))
    return beside_peers(found)


def _mean_share(trials: Trials, contestant: Contestant, speed: float, seeds: Sequence[int]) -> float:
    """Return the mean share in target; the first seed decides alone where it lies clear of what is enough."""
    shares: list[float] = []
    for seed in seeds:
        shares.append(trials.get(contestant, Case(contestant.name, speed, seed)).figures.in_target)
        if abs(shares[0] - ENOUGH) > CLEAR:
            break
    return statistics.fmean(shares)


def beside_peers(rows: Sequence[LimitRow]) -> list[LimitRow]:
    """Add the ratios to the best peer; none where a limit is not known or lies below what was looked at."""
    peers = [row.limit.speed for row in rows if not row.ours and row.limit.speed is not None]
    best = max(peers, default=None)
    return [
        LimitRow(row.contestant, row.ours, row.limit, row.limit.speed / best)
        if row.ours and best is not None and row.limit.speed is not None
        else row
        for row in rows
    ]


def limit_text(limit: Limit) -> str:
    """Say a limit in words."""
    if limit.speed is None:
        return "none of the speeds"
    return f"{limit.speed:g} and perhaps beyond" if limit.open_end else f"{limit.speed:g}"


def _row(trials: Sequence[Trial]) -> Row:
    shares = [trial.figures.in_target for trial in trials]
    first = trials[0]
    return Row(
        speed=first.case.speed,
        contestant=first.case.contestant,
        ours=first.ours,
        seeds=len(trials),
        in_target=statistics.fmean(shares),
        in_target_range=(min(shares), max(shares)),
        goodput=statistics.fmean(trial.figures.goodput for trial in trials),
        ttft_p50=_median(trial.figures.ttft.p50 for trial in trials),
        ttft_p99=_median(trial.figures.ttft.p99 for trial in trials),
        tpot_p99=_median(trial.figures.tpot.p99 for trial in trials),
        cached_share=_median(trial.served.cached_share for trial in trials),
        failures=_failures(trials),
        router_us=statistics.median(trial.router_us for trial in trials),
    )


def _beside_peer(row: Row, rows: Sequence[Row]) -> Row:
    peers = [item for item in rows if item.speed == row.speed and not item.ours]
    if not row.ours or not peers:
        return row
    best = max(peers, key=lambda item: item.in_target)
    return replace(
        row,
        share_to_peer=_ratio(row.in_target, best.in_target),
        ttft_p99_to_peer=_ratio(row.ttft_p99, best.ttft_p99),
    )


def _slow_row(slow: Slow, speed: float, name: str, trials: Sequence[Trial]) -> SlowRow:
    of_this = [trial for trial in trials if (trial.case.contestant, trial.case.speed) == (name, speed)]
    mine = [trial for trial in of_this if trial.case.slow == slow]
    seeds = {trial.case.seed for trial in mine}
    healthy = [trial for trial in of_this if trial.case.slow is None and trial.case.seed in seeds]
    rest = _median(_p99(trial.rest, slow) for trial in mine)
    usual = _median(_p99(trial.figures, slow) for trial in healthy)
    return SlowRow(
        slow=str(slow),
        speed=speed,
        contestant=name,
        ours=mine[0].ours,
        seeds=len(mine),
        part_of_equal_share=statistics.fmean(_part(trial, slow) for trial in mine),
        in_target=statistics.fmean(trial.figures.in_target for trial in mine),
        rest_p99=rest,
        healthy_p99=usual,
        ratio=_ratio(rest, usual),
        failures=_failures(mine),
    )


def _part(trial: Trial, slow: Slow) -> float:
    counts = trial.served.prefill if slow.role == "prefill" else trial.served.decode
    return counts[0] * len(counts) / max(1, sum(counts))


def _p99(figures: Figures | None, slow: Slow) -> float | None:
    if figures is None:
        return None
    return figures.ttft.p99 if slow.role == "prefill" else figures.tpot.p99


def _failures(trials: Sequence[Trial]) -> int:
    return sum(trial.figures.requests - trial.figures.answered for trial in trials)


def _median(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return statistics.median(told) if told else None


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
