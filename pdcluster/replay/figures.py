"""What a run amounts to: percentiles, goodput under targets, cached share, failures, the generator's own cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdcluster.replay.driver import Record, Run


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must keep to count as good, in seconds.

    The first token within `ttft` and `ttft_per_token` for each prompt token beyond `ttft_free_tokens`; tokens after it
    at `tpot` each on average. An answer of one token has no TPOT and keeps that target.
    """

    ttft: float = 0.5
    ttft_per_token: float = 0.00025
    ttft_free_tokens: int = 2000
    tpot: float = 0.03

    def ttft_for(self, input_tokens: int) -> float:
        """Return the seconds that the first token of a prompt of this length may take."""
        return self.ttft + self.ttft_per_token * max(0, input_tokens - self.ttft_free_tokens)

    def met(self, record: Record) -> bool:
        """Tell whether a request was answered whole and in time."""
        if record.error or record.ttft is None:
            return False
        return record.ttft <= self.ttft_for(record.input_tokens) and (record.tpot or 0.0) <= self.tpot


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of some seconds: the smallest value that so many percent do not exceed. All None of no values."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A kind of failure, how often it came, and the first words of the first."""

    kind: str
    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Generator:
    """What the load generator itself cost and how late it sent, in seconds; `core_share` is of one core."""

    lateness: Percentiles
    cpu_seconds: float
    core_share: float
    cpu_us_per_request: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, times in seconds; percentiles are of the requests that were answered whole.

    `in_target` is the share of all requests, failed ones included, that kept the targets; `goodput` how many a second
    did, until the last answer ended. `cached_share` is of the prompt tokens that usage told, None where none told.
    `prompt_tokens` is how many tokens the engine counted for each that the trace asks for, None where none told.
    """

    requests: int
    answered: int
    in_target: float
    ttft_in_target: float
    tpot_in_target: float
    goodput: float
    seconds: float
    output_tokens_per_second: float
    ttft: Percentiles
    tpot: Percentiles
    end_to_end: Percentiles
    cached_share: float | None
    prompt_tokens: float | None
    ended_early: int
    most_in_flight: int
    mean_in_flight: float
    failures: tuple[Failure, ...]
    generator: Generator


def percentiles(values: Iterable[float]) -> Percentiles:
    """Return the percentiles of some values."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles(None, None, None, None, None)
    # The rank is rounded up; in whole numbers, since 0.95 has no exact binary form.
    p50, p90, p95, p99 = (ordered[-(-percent * len(ordered) // 100) - 1] for percent in (50, 90, 95, 99))
    return Percentiles(p50, p90, p95, p99, ordered[-1])


def make_figures(run: Run, targets: Targets) -> Figures:
    """Return the figures of a run."""
    records = run.records
    good = [record for record in records if not record.error]
    met = sum(map(targets.met, good))
    in_ttft = sum(1 for item in good if (item.ttft or 0.0) <= targets.ttft_for(item.input_tokens))
    in_tpot = sum(1 for item in good if (item.tpot or 0.0) <= targets.tpot)
    count, seconds = max(1, len(records)), max(run.seconds, 1e-9)
    return Figures(
        requests=len(records),
        answered=len(good),
        in_target=met / count,
        ttft_in_target=in_ttft / count,
        tpot_in_target=in_tpot / count,
        goodput=met / seconds,
        seconds=run.seconds,
        output_tokens_per_second=sum(record.tokens for record in records) / seconds,
        ttft=percentiles(item.ttft for item in good if item.ttft is not None),
        tpot=percentiles(item.tpot for item in good if item.tpot is not None),
        end_to_end=percentiles(item.seconds for item in good),
        cached_share=_cached_share(good),
        prompt_tokens=_prompt_tokens(good),
        ended_early=sum(1 for item in good if item.tokens < item.output_tokens),
        most_in_flight=run.most_in_flight,
        mean_in_flight=sum(item.ended - item.sent for item in records if item.sent is not None) / seconds,
        failures=_failures(records),
        generator=_generator(run),
    )


def _cached_share(records: Sequence[Record]) -> float | None:
    told = [item for item in records if item.cached_tokens is not None and item.prompt_tokens]
    if not told:
        return None
    return sum(item.cached_tokens or 0 for item in told) / sum(item.prompt_tokens or 0 for item in told)


def _prompt_tokens(records: Sequence[Record]) -> float | None:
    told = [item for item in records if item.prompt_tokens]
    return sum(item.prompt_tokens or 0 for item in told) / sum(item.input_tokens for item in told) if told else None


def _failures(records: Sequence[Record]) -> tuple[Failure, ...]:
    counts = Counter(record.error for record in records if record.error)
    first: dict[str, str] = {}
    for record in records:
        first.setdefault(record.error, record.detail)
    return tuple(Failure(kind, count, first[kind]) for kind, count in counts.most_common())


def _generator(run: Run) -> Generator:
    late = [record.sent - record.due for record in run.records if record.sent is not None]
    return Generator(
        lateness=percentiles(late),
        cpu_seconds=run.cpu_seconds,
        core_share=run.cpu_seconds / max(run.seconds, 1e-9),
        cpu_us_per_request=1e6 * run.cpu_seconds / max(1, len(run.records)),
    )
