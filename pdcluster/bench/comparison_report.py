"""The comparison of schedulers as tables for a person and as JSON for a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pdcluster.bench.comparison import CLEAR, LimitRow, Row, SlowRow, limit_text, make_rows, make_slow_rows
from pdcluster.bench.limits import ENOUGH
from pdcluster.bench.trials import SEED_CHANGES, Setting, Trial

if TYPE_CHECKING:
    from rich.table import Table

_BUSY = 0.85
_LATE_S = 0.05
_OTHERS = 0.3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was found so far."""

    setting: Setting
    trials: tuple[Trial, ...]
    limits: tuple[LimitRow, ...] = ()


def to_json(found: Comparison) -> dict[str, Any]:
    """Return everything for a machine."""
    setting = found.setting
    return {
        "rows": [asdict(row) for row in make_rows(found.trials)],
        "limits": [asdict(row) for row in found.limits],
        "slow": [asdict(row) for row in make_slow_rows(found.trials)],
        "warnings": warnings(found.trials),
        "conditions": {
            "engines": f"{setting.prefill} prefill and {setting.decode} decode, {setting.program.name}",
            "targets": asdict(setting.targets),
            "enough_in_target": ENOUGH,
            "limits": f"of the first seed where it is {CLEAR:g} or more from enough, else of all seeds",
            "seed_changes": SEED_CHANGES,
            "over_seeds": "means of shares and goodput, medians of percentiles, sums of failures",
        },
        "trials": [asdict(trial) for trial in found.trials],
    }


def tables(found: Comparison) -> list[Table]:
    """Return what there is to show, each part as a table."""
    rows, slow = make_rows(found.trials), make_slow_rows(found.trials)
    made = [_main(rows)] if rows else []
    made += [_limits(found.limits)] if found.limits else []
    return [*made, _slow(slow)] if slow else made


def warnings(trials: Sequence[Trial]) -> list[str]:
    """Say which trials this machine may have been too small or too busy for."""
    said = []
    for trial in trials:
        late = trial.figures.generator.lateness.p99 or 0.0
        if trial.engines_core > _BUSY:
            said.append(f"{trial.case}: the simulated engines took {trial.engines_core:.0%} of a core, so they lagged")
        if trial.others_cores > _OTHERS:
            said.append(f"{trial.case}: other programs took {trial.others_cores:.1f} cores meanwhile")
        if late > _LATE_S:
            said.append(f"{trial.case}: one request in a hundred was sent more than {late * 1000:.0f} ms late")
    return said


def _main(rows: Sequence[Row]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - only for people

    shown = Table(
        *("speed", "router", "in target", "of seeds", "TTFT p50 s", "p99 s", "TPOT p99 ms", "cached", "failed"),
        *("router us", "share to best peer", "p99 TTFT to it"),
    )
    for row in rows:
        low, high = row.in_target_range
        shown.add_row(
            f"{row.speed:g}",
            row.contestant,
            f"{row.in_target:.3f}",
            f"{low:.3f} to {high:.3f}" if row.seeds > 1 else "",
            _number(row.ttft_p50),
            _number(row.ttft_p99),
            _number(row.tpot_p99, 1000, 1),
            _number(row.cached_share),
            str(row.failures),
            f"{row.router_us:,.0f}",
            _number(row.share_to_peer),
            _number(row.ttft_p99_to_peer),
        )
    return shown


def _limits(rows: Sequence[LimitRow]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - only for people

    shown = Table("router", f"highest speed with {ENOUGH:.0%} in target", "to best peer", "in target by speed")
    for row in rows:
        shares = ", ".join(f"{speed:g}: {share:.3f}" for speed, share in row.limit.shares.items())
        shown.add_row(row.contestant, limit_text(row.limit), _number(row.to_peer), shares)
    return shown


def _slow(rows: Sequence[SlowRow]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - only for people

    shown = Table(
        *("slow engine", "speed", "router", "it got, of an equal share", "in target", "p99 of the rest ms"),
        *("with none slow ms", "ratio", "failed"),
    )
    for row in rows:
        shown.add_row(
            row.slow,
            f"{row.speed:g}",
            row.contestant,
            f"{row.part_of_equal_share:.2f}",
            f"{row.in_target:.3f}",
            _number(row.rest_p99, 1000, 1),
            _number(row.healthy_p99, 1000, 1),
            _number(row.ratio),
            str(row.failures),
        )
    return shown


def _number(value: float | None, times: float = 1.0, digits: int = 2) -> str:
    return "" if value is None else f"{value * times:,.{digits}f}"
