"""A picture of a run: first tokens, pace and requests in flight over its time, as SVG that needs nothing to be seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from xml.sax.saxutils import escape

from pdcluster.replay.driver import Record
from pdcluster.replay.figures import Targets, percentiles

_WIDTH, _PANEL, _GAP, _LEFT, _TOP = 960, 190, 46, 70, 70
_RIGHT = _WIDTH - 20
_BINS = 48
_MOST_DOTS = 6000
_MS = 1000
_MET, _MISSED, _FAILED, _LINE, _GREY = "#0072b2", "#e69f00", "#d62728", "#222222", "#999999"
_DECADES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0)


@dataclass(frozen=True, slots=True)
class _Panel:
    """A place with its own scale: `low` to `high` upwards, by powers of ten or evenly; 0 to `seconds` to the right."""

    top: float
    seconds: float
    low: float
    high: float
    powers: bool

    def x(self, at: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, at / self.seconds)), 1)

    def y(self, value: float) -> float:
        inside = min(self.high, max(self.low, value))
        if self.powers:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            share = (inside - self.low) / (self.high - self.low)
        return round(self.top + _PANEL * (1 - share), 1)

    def ticks(self) -> list[float]:
        if self.powers:
            return [value for value in _DECADES if self.low <= value <= self.high]
        return [self.low + (self.high - self.low) * part / 4 for part in range(5)]


def draw(records: Sequence[Record], targets: Targets, title: str) -> str:
    """Return the picture of a run as an SVG document; of many requests, evenly chosen ones have dots."""
    seconds = max((record.ended for record in records), default=1.0) or 1.0
    step = -(-len(records) // _MOST_DOTS) or 1
    dots = records[::step]
    note = "" if step == 1 else f"; dots for one request in {step}"
    height = _TOP + 3 * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 22, title, size=15),
        *_legend(f"time of the run in seconds{note}"),
        *_latencies(0, "time to first token, s", records, dots, lambda item: item.ttft, targets, seconds),
        *_latencies(1, "time a token after it, ms", records, dots, _tpot_ms, targets, seconds),
        *_in_flight(records, seconds),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _tpot_ms(record: Record) -> float | None:
    return None if record.tpot is None else record.tpot * _MS


def _latencies(
    place: int,
    title: str,
    records: Sequence[Record],
    dots: Sequence[Record],
    value: Callable[[Record], float | None],
    targets: Targets,
    seconds: float,
) -> Iterator[str]:
    """Draw a dot for each request where it was due, and lines of the median and the 95th percentile."""
    seen = [(item.due, found) for item in records if (found := value(item)) is not None and not item.error]
    values = [max(found, _DECADES[0]) for _, found in seen] or [1.0]
    low = 10.0 ** math.floor(math.log10(min(values)))
    high = max(10.0 ** math.ceil(math.log10(max(values))), low * 10)
    panel = _Panel(_TOP + place * (_PANEL + _GAP), seconds, low, high, powers=True)
    yield from _frame(panel, title)
    for item in dots:
        found, x = value(item), panel.x(item.due)
        if item.error:
            yield f'<path d="M{x - 3},{panel.top + 2}l6,6m0,-6l-6,6" stroke="{_FAILED}"/>'
        elif found is not None:
            colour = _MET if targets.met(item) else _MISSED
            yield f'<circle cx="{x}" cy="{panel.y(found)}" r="2" fill="{colour}" fill-opacity="0.55"/>'
    for dash, points in zip(("", "5 3"), _lines(panel, seen, seconds), strict=True):
        if points:
            yield _polyline(points, _LINE, dash)


def _lines(panel: _Panel, seen: Sequence[tuple[float, float]], seconds: float) -> tuple[list[str], list[str]]:
    bins: dict[int, list[float]] = {}
    for due, found in seen:
        bins.setdefault(min(_BINS - 1, int(due / seconds * _BINS)), []).append(found)
    middle, high = [], []
    for index, values in sorted(bins.items()):
        spread, x = percentiles(values), panel.x((index + 0.5) * seconds / _BINS)
        middle.append(f"{x},{panel.y(spread.p50 or 0.0)}")
        high.append(f"{x},{panel.y(spread.p95 or 0.0)}")
    return middle, high


def _in_flight(records: Sequence[Record], seconds: float) -> Iterator[str]:
    """Draw how many requests were in flight, as steps, at most one for each point that can be seen."""
    changes = [(item.sent, 1) for item in records if item.sent is not None]
    changes = sorted(changes + [(item.ended, -1) for item in records if item.sent is not None])
    counts = list(accumulate(change for _, change in changes))
    most = max(counts, default=1)
    panel = _Panel(_TOP + 2 * (_PANEL + _GAP), seconds, 0.0, float(max(most, 1)), powers=False)
    yield from _frame(panel, "requests in flight")
    highest: dict[float, int] = {}
    for (at, _), count in zip(changes, counts, strict=True):
        x = panel.x(at)
        highest[x] = max(highest.get(x, 0), count)
    if highest:
        yield _polyline([f"{x},{panel.y(count)}" for x, count in sorted(highest.items())], _MET, "")


def _frame(panel: _Panel, title: str) -> Iterator[str]:
    bottom = panel.top + _PANEL
    yield _text(_LEFT, panel.top - 6, title)
    for value in panel.ticks():
        y = panel.y(value)
        yield f'<path d="M{_LEFT},{y}H{_RIGHT}" stroke="{_GREY}" stroke-opacity="0.3"/>'
        yield _text(_LEFT - 6, y + 4, f"{value:g}", anchor="end")
    for part in range(7):
        at = panel.seconds * part / 6
        yield _text(panel.x(at), bottom + 16, f"{at:.0f}", anchor="middle")
    yield f'<rect x="{_LEFT}" y="{panel.top}" width="{_RIGHT - _LEFT}" height="{_PANEL}" fill="none" stroke="{_GREY}"/>'


def _legend(note: str) -> Iterator[str]:
    x = float(_LEFT)
    for colour, words in ((_MET, "in target"), (_MISSED, "late"), (_FAILED, "failed")):
        yield f'<circle cx="{x + 4}" cy="36" r="4" fill="{colour}"/>'
        yield _text(x + 12, 40, words)
        x += 80
    yield _text(x, 40, f"line: median, dashed: 95th percentile; {note}")


def _polyline(points: Sequence[str], colour: str, dash: str) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.3"{dashed}/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{_LINE}">{escape(words)}</text>'
