"""What a replay found, for a machine and for a person, always with the conditions that it holds under."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from pdcluster.replay.driver import Record
from pdcluster.replay.figures import Figures, Percentiles, Targets, percentiles
from pdcluster.replay.prompts import CHARACTERS_PER_TOKEN
from pdcluster.replay.replaying import Replay
from pdcluster.replay.trace import Schedule, Shape, Trace

if TYPE_CHECKING:
    from rich.table import Table

_LATE_S = 0.05
_MS = 1000


@dataclass(frozen=True, slots=True)
class Known:
    """What only the caller can know of the endpoint; None where it doesn't: then the record says null."""

    url: str
    revision: str | None = None
    cache_state: str | None = None
    repetitions: int = 1


def conditions(
    known: Known, trace: Trace, shape: Shape, schedule: Schedule, how: Replay, found: Figures
) -> dict[str, Any]:
    """Return what the figures hold for; null is what nobody knows."""
    arrivals = schedule.arrivals
    return {
        "endpoint": known.url,
        "api": how.asking.api,
        "model": how.asking.model,
        "revision": known.revision,
        "trace": {
            "file": trace.name,
            "requests": trace.total,
            "from_s": trace.window.begin,
            "to_s": trace.window.end,
            "replayed": len(arrivals),
            "share_replayed": len(arrivals) / trace.total,
            "left_out_as_too_long": schedule.dropped,
            "longest_input_taken": shape.max_input,
            "outputs_cut_at": shape.max_output,
            "speed": shape.speed,
            "spread_s": shape.spread,
            "seed": shape.seed,
            "seed_changes": "order of requests of one timestamp (0: the file's), their spread, the words of prompts",
        },
        "input_tokens": _lengths([item.input_tokens for item in arrivals]),
        "output_tokens": _lengths([item.output_tokens for item in arrivals]),
        "prompt": f"{shape.block_tokens} tokens a block of the trace, {CHARACTERS_PER_TOKEN} characters a token",
        "prompt_tokens_counted_per_token_asked": found.prompt_tokens,
        "concurrency": {
            "loop": "open",
            "requests_per_second": len(arrivals) / max(schedule.seconds, 1e-9),
            "mean_in_flight": found.mean_in_flight,
            "most_in_flight": found.most_in_flight,
            "limit_in_flight": how.limits.in_flight,
            "connections": "one a request",
        },
        "cache_state": known.cache_state,
        "warm_up_requests": how.warm_up,
        "sampling": {"temperature": 0, "ignore_eos": how.asking.whole_output},
        "timeout_s": how.limits.timeout,
        "repetitions": known.repetitions,
        "failures": {failure.kind: failure.count for failure in found.failures},
        "generator": {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "pdcluster": metadata.version("pdcluster"),
        },
    }


def to_json(found: Figures, targets: Targets, told: dict[str, Any], records: Sequence[Record] = ()) -> dict[str, Any]:
    """Return everything for a machine; with a line for each request where records are given."""
    made = {"figures": asdict(found), "targets": asdict(targets), "conditions": told}
    return {**made, "requests": [asdict(record) for record in records]} if records else made


def table(found: Figures) -> Table:
    """Return the latencies for a person, in milliseconds."""
    from rich.table import Table  # noqa: PLC0415 - only for people

    shown = Table("ms", *(("p50", "p90", "p95", "p99", "most")))
    rows = (
        ("TTFT", found.ttft),
        ("TPOT", found.tpot),
        ("end to end", found.end_to_end),
        ("sent late by", found.generator.lateness),
    )
    for name, values in rows:
        shown.add_row(name, *_milliseconds(values))
    return shown


def sentences(found: Figures, targets: Targets) -> list[str]:
    """Return what a person should know besides the table."""
    cached = "unknown" if found.cached_share is None else f"{found.cached_share:.1%}"
    first = f"{targets.ttft:g} s and {targets.ttft_per_token * _MS:g} ms a token beyond {targets.ttft_free_tokens}"
    kept = f"TTFT {first}: {found.ttft_in_target:.1%}; TPOT {targets.tpot * _MS:g} ms: {found.tpot_in_target:.1%}"
    flight = f"in flight {found.mean_in_flight:.0f} on average, {found.most_in_flight} at most"
    said = [
        f"{found.in_target:.1%} of {found.requests} requests in target ({kept})",
        f"goodput {found.goodput:.2f} requests/s, {found.output_tokens_per_second:,.0f} tokens/s; {flight}",
        f"cached share of prompts: {cached}",
    ]
    said += [f"failed: {item.count} x {item.kind}; the first: {item.first or '-'}" for item in found.failures]
    if found.ended_early:
        said.append(f"{found.ended_early} answers ended before the trace's length (--whole-output asks for it)")
    own = found.generator
    said.append(f"the generator took {own.core_share:.0%} of a core, {own.cpu_us_per_request:,.0f} us a request")
    late = own.lateness.p99 or 0.0
    if late > _LATE_S:
        what = f"one request in a hundred was sent more than {late * _MS:.0f} ms late, which its TTFT includes"
        said.append(f"warning: {what}; this machine is too busy to generate this load")
    return said


def _lengths(values: Sequence[int]) -> dict[str, float | None]:
    spread = percentiles(values)
    return {
        "mean": sum(values) / len(values) if values else None,
        "p50": spread.p50,
        "p99": spread.p99,
        "most": spread.most,
        "sum": sum(values),
    }


def _milliseconds(values: Percentiles) -> list[str]:
    return ["-" if value is None else f"{value * _MS:,.1f}" for value in asdict(values).values()]
