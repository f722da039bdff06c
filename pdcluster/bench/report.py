"""Figures of all rounds: medians, ratios round by round, and whether the aims are met."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from pdcluster.bench.cases import Case, Figure
from pdcluster.bench.runs import Run

if TYPE_CHECKING:
    from rich.table import Table

OURS, PEER, FLOOR = "pdcluster", "vllm-router", "TCP relay"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: medians over the rounds, and the median, least and greatest of the ratios of single rounds."""

    case: str
    figure: str
    unit: str
    ours: float
    peer: float | None
    floor: float | None
    ratio: float | None
    ratio_range: tuple[float, float] | None
    target: str
    met: bool | None


def make_rows(cases: Sequence[Case], runs: Sequence[Run]) -> list[Row]:
    """Return a row a figure."""
    return [_row(case, figure, runs) for case in cases for figure in case.figures]


def _row(case: Case, figure: Figure, runs: Sequence[Run]) -> Row:
    values = {
        router: [figure.of(run.measurement) for run in runs if (run.case, run.router) == (case.name, router)]
        for router in (OURS, PEER, FLOOR)
    }
    ours = statistics.median(values[OURS])
    pairs = [] if figure.most is not None else zip(values[OURS], values[PEER], strict=False)
    ratios = [mine / theirs for mine, theirs in pairs if theirs > 0]
    ratio = statistics.median(ratios) if ratios else None
    target, met = "", None
    if figure.most is not None:
        target, met = f"<= {figure.most:g} {figure.unit}", ours <= figure.most
    elif figure.target is not None:
        target, met = f"<= {figure.target:g}", None if ratio is None else ratio <= figure.target
    return Row(
        case=case.name,
        figure=figure.name,
        unit=figure.unit,
        ours=ours,
        peer=statistics.median(values[PEER]) if values[PEER] else None,
        floor=statistics.median(values[FLOOR]) if values[FLOOR] else None,
        ratio=ratio,
        ratio_range=(min(ratios), max(ratios)) if ratios else None,
        target=target,
        met=met,
    )


def conditions(cases: Sequence[Case], rounds: int, scale: float, workers: int, peer: str) -> dict[str, Any]:
    """Return what the figures hold for; `requests` are those of each case in each round, on each router."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "pdcluster": metadata.version("pdcluster"),
        "peer": peer,
        "rounds": rounds,
        "scale": scale,
        "requests": {case.name: case.load.requests for case in cases},
        "workers": workers,
        "engines": "2 prefill and 4 decode stand-ins in one process, without a model",
        "ours": "API keys with limits, metrics, health probes and all time limits on",
    }


def to_json(rows: Sequence[Row], told: dict[str, Any]) -> dict[str, Any]:
    """Return everything for a machine."""
    return {"conditions": told, "figures": [asdict(row) for row in rows]}


def told(conditions: dict[str, Any]) -> str:
    """Return the conditions in one line, for a person."""
    requests = ", ".join(f"{name} {count:,}" for name, count in conditions["requests"].items())
    return "; ".join(f"{key}: {requests if key == 'requests' else value}" for key, value in conditions.items())


def table(rows: Sequence[Row]) -> Table:
    """Return everything for a person."""
    from rich.table import Table  # noqa: PLC0415 - only for people

    shown = Table("figure", "pdcluster", "vllm-router", "ratio (range)", "aim", "", "TCP relay")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        if row.ratio_range is not None:
            ratio += f" ({row.ratio_range[0]:.2f} to {row.ratio_range[1]:.2f})"
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[row.met]
        shown.add_row(
            row.figure,
            _number(row.ours, row.unit),
            _number(row.peer, row.unit),
            ratio,
            row.target,
            verdict,
            _number(row.floor, row.unit),
        )
    return shown


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.1f} {unit}"
