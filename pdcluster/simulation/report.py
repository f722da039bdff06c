"""What a run in virtual time amounts to, for people and machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from pdcluster.replay.figures import Percentiles, Targets, percentiles
from pdcluster.replay.trace import Arrival, Trace
from pdcluster.replay.trace import Shape as Pace
from pdcluster.simulation.engine import Engine
from pdcluster.simulation.virtual import Outcome, Shape


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run; times in seconds, percentiles of the requests that were answered.

    Shares in target are of all requests, refused and failed ones included; `goodput` is how many a second kept both
    targets, until the last was over. `cached_share` is of the prompt tokens of what was answered. `seconds` is virtual.
    """

    requests: int
    answered: int
    in_target: float
    ttft_in_target: float
    tpot_in_target: float
    goodput: float
    seconds: float
    ttft: Percentiles
    tpot: Percentiles
    end_to_end: Percentiles
    cached_share: float | None
    not_answered: dict[str, int]
    preempted: int
    expired: int

    def to_json(self) -> dict[str, Any]:
        """Return everything, for machines."""
        return asdict(self)


def summarize(outcomes: Sequence[Outcome], targets: Targets, engines: Sequence[Engine]) -> Summary:
    """Return the figures of a run."""
    good = [outcome for outcome in outcomes if not outcome.error]
    timely = [(_in_ttft(outcome, targets), (outcome.tpot or 0.0) <= targets.tpot) for outcome in good]
    count = max(1, len(outcomes))
    met = sum(first and each for first, each in timely)
    begun = outcomes[0].request.arrived if outcomes else 0.0
    seconds = max((outcome.done or 0.0 for outcome in good), default=begun) - begun
    prompts = sum(outcome.request.prompt_tokens for outcome in good)
    return Summary(
        requests=len(outcomes),
        answered=len(good),
        in_target=met / count,
        ttft_in_target=sum(first for first, _ in timely) / count,
        tpot_in_target=sum(each for _, each in timely) / count,
        goodput=met / seconds if seconds > 0.0 else 0.0,
        seconds=seconds,
        ttft=percentiles(outcome.ttft for outcome in good if outcome.ttft is not None),
        tpot=percentiles(outcome.tpot for outcome in good if outcome.tpot is not None),
        end_to_end=percentiles((outcome.done or 0.0) - outcome.request.arrived for outcome in good),
        cached_share=sum(outcome.cached_tokens for outcome in good) / prompts if prompts else None,
        not_answered=dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        preempted=sum(engine.counts.preempted for engine in engines),
        expired=sum(engine.counts.expired for engine in engines),
    )


def overlaid(arrivals: Sequence[Arrival], copies: int, seconds: float) -> list[Arrival]:
    """Return a load `copies` times as large: copies that share no blocks, each begun at another place of the trace.

    `seconds` is how long the load lasts; a copy goes round, so that the bursts of copies don't meet.
    """
    if copies == 1:
        return list(arrivals)
    made = [
        Arrival(
            (arrival.due + copy * seconds / copies) % seconds,
            arrival.input_tokens,
            arrival.output_tokens,
            tuple(block * copies + copy for block in arrival.blocks),
        )
        for copy in range(copies)
        for arrival in arrivals
    ]
    made.sort(key=lambda arrival: arrival.due)
    return made


def conditions(trace: Trace, pace: Pace, shape: Shape, router: str, copies: int) -> dict[str, Any]:
    """Return everything that a run depends on, so that it can be repeated."""
    return {
        "trace": trace.name,
        "of": trace.total,
        "window": asdict(trace.window),
        "pace": asdict(pace),
        "copies": copies,
        "router": router,
        "prefill": shape.prefill,
        "decode": shape.decode,
        "slow": {f"{role}-{index}": factor for (role, index), factor in (shape.slow or {}).items()},
        "profile": asdict(shape.profile),
        "targets": asdict(shape.targets),
        "seed": shape.seed,
    }


def table(summary: Summary) -> Table:
    """Return the figures as a table for a terminal."""
    made = Table("", "p50", "p90", "p99", "most", title="Latencies in milliseconds")
    for name, values in (
        ("first token", summary.ttft),
        ("each token after it", summary.tpot),
        ("end to end", summary.end_to_end),
    ):
        made.add_row(name, *(_ms(value) for value in (values.p50, values.p90, values.p99, values.most)))
    return made


def told(summary: Summary) -> str:
    """Return the other figures in a few lines."""
    cached = "no" if summary.cached_share is None else f"{summary.cached_share:.1%} of"
    timely = f"first token {summary.ttft_in_target:.1%}, others {summary.tpot_in_target:.1%}"
    lines = [
        f"in target: {summary.in_target:.1%} of {summary.requests} requests ({timely})",
        f"goodput: {summary.goodput:.2f} requests/s over {summary.seconds:.0f} s; {cached} prompt tokens were cached",
    ]
    if summary.not_answered:
        lines.append("not answered: " + ", ".join(f"{count} {why}" for why, count in summary.not_answered.items()))
    if summary.preempted or summary.expired:
        lines.append(f"preempted: {summary.preempted}; leases that ended: {summary.expired}")
    return "\n".join(lines)


def _in_ttft(outcome: Outcome, targets: Targets) -> bool:
    return outcome.ttft is not None and outcome.ttft <= targets.ttft_for(outcome.request.prompt_tokens)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"
