"""`bench scheduling`: how many requests our scheduling serves in time, against the peer's policies, on one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pdcluster.commands import options
from pdcluster.commands.replaying import (
    Begin,
    BlockTokens,
    End,
    MaxInput,
    Spread,
    Timeout,
    TpotMs,
    TracePath,
    TtftFree,
    TtftMs,
    TtftPerToken,
    window_of,
    writable,
)

if TYPE_CHECKING:
    from pdcluster.bench.contestants import Contestant
    from pdcluster.bench.limits import Range
    from pdcluster.bench.simulated import Slow
    from pdcluster.bench.trials import Setting

_Value = TypeVar("_Value")
EPILOG = """\b
Examples:
  pdcluster bench scheduling conversation_trace.jsonl.gz --engines sim_engine.py --speeds 3,4,5 --seeds 1,2,3
  pdcluster bench scheduling trace.jsonl --engines sim_engine.py --policy auto --policy least_loaded --peers none
  pdcluster bench scheduling trace.jsonl --engines sim_engine.py --find-limit --limit-from 3 --limit-to 6 --out f.json
  pdcluster bench scheduling trace.jsonl --engines sim_engine.py --speeds 3 --slow decode:5 --slow prefill:3
The program of engines is run as: FILE PREFILL_PORTS DECODE_PORTS [--slow PORT:FACTOR], and answers GET /stats."""

Engines = Annotated[Path, typer.Option(help="Program of simulated engines.", show_default=False)]
Prefill = Annotated[int, typer.Option(min=1, max=500, help="Prefill engines.")]
Decode = Annotated[int, typer.Option(min=1, max=500, help="Decode engines.")]
Speeds = Annotated[str, typer.Option(help="Speeds of the trace.")]
Seeds = Annotated[str, typer.Option(help="Seeds; each changes the order within a timestamp, words, engines' order.")]
Policy = Annotated[list[str] | None, typer.Option(help="Our policies, one run each.", show_default="the default")]
ProxyFlag = Annotated[list[str] | None, typer.Option(help="One more word for our proxy's argv.", show_default=False)]
Peers = Annotated[str, typer.Option(help="vllm-router's policies, or none.")]
MaxOutput = Annotated[int, typer.Option(min=1, help="Cut outputs at so many tokens.")]
FindLimit = Annotated[bool, typer.Option("--find-limit", help="Find the highest speed with 90 % in target.")]
LimitFrom = Annotated[float, typer.Option(min=0.1, help="Lowest speed that is looked at.")]
LimitTo = Annotated[float, typer.Option(min=0.1, help="Highest speed that is looked at.")]
LimitStep = Annotated[float, typer.Option(min=0.01, help="How finely.")]
SlowOption = Annotated[
    list[str] | None, typer.Option("--slow", metavar="ROLE:FACTOR", help="Also with one slow engine.")
]
Out = Annotated[Path | None, typer.Option(help="Write JSON here, after every run.", show_default=False)]


def scheduling(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    trace: TracePath,
    engines: Engines,
    prefill: Prefill = 4,
    decode: Decode = 8,
    speeds: Speeds = "3,3.5,4,4.5,5",
    seeds: Seeds = "1,2,3",
    policy: Policy = None,
    proxy_flag: ProxyFlag = None,
    peers: Peers = "round_robin,power_of_two,cache_aware",
    begin: Begin = 600.0,
    end: End = 960.0,
    max_output: MaxOutput = 200,
    max_input: MaxInput = None,
    block_tokens: BlockTokens = 512,
    spread: Spread = 0.0,
    ttft_ms: TtftMs = 500.0,
    ttft_per_token_ms: TtftPerToken = 0.25,
    ttft_free_tokens: TtftFree = 2000,
    tpot_ms: TpotMs = 30.0,
    timeout: Timeout = 60.0,
    find_limit: FindLimit = False,
    limit_from: LimitFrom = 2.0,
    limit_to: LimitTo = 7.0,
    limit_step: LimitStep = 0.1,
    slow: SlowOption = None,
    as_json: options.Json = False,
    out: Out = None,
) -> None:
    """Replay a trace on simulated engines behind our proxy and behind vllm-router, in turn; print who is in time."""
    from pdcluster.bench.contestants import find_contestants
    from pdcluster.bench.limits import Range
    from pdcluster.bench.simulated import parse_slow
    from pdcluster.bench.trials import Setting
    from pdcluster.replay.figures import Targets
    from pdcluster.replay.trace import Shape, read_trace

    targets = Targets(ttft_ms / 1000, ttft_per_token_ms / 1000, ttft_free_tokens, tpot_ms / 1000)
    shape = Shape(1.0, max_output, max_input, block_tokens, spread)
    slows = [parse_slow(text) for text in slow or ()]
    names = [] if peers == "none" else _listed("--peers", peers, str)
    contestants = find_contestants(policy or [], proxy_flag or [], names)
    grid = _listed("--speeds", speeds, _speed), _listed("--seeds", seeds, int)
    writable(out)
    setting = Setting(read_trace(trace, window_of(begin, end)), shape, targets, engines, prefill, decode, timeout)
    limits = Range(limit_from, limit_to, limit_step) if find_limit else None
    with _ended_by_sigterm():
        _compare(setting, contestants, grid, slows, limits, as_json, out)


def _compare(
    setting: Setting,
    contestants: Sequence[Contestant],
    grid: tuple[list[float], list[int]],
    slows: Sequence[Slow],
    limits: Range | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Run everything, keeping what there is after each run; then show it."""
    import json
    import time

    from rich.console import Console

    from pdcluster.bench.comparison import find_limits, run_grid
    from pdcluster.bench.comparison_report import Comparison, tables, to_json, warnings
    from pdcluster.bench.trials import Trial, Trials

    began, total = time.monotonic(), len(grid[0]) * len(grid[1]) * len(contestants) * (1 + len(slows))

    def keep(trial: Trial) -> None:
        found = trial.figures
        failed = found.requests - found.answered
        options.say(
            f"{len(trials.done)} of {total}{' and the search' if limits else ''}, {time.monotonic() - began:.0f} s: "
            f"{trial.case}: {found.in_target:.1%} in target, p99 TTFT {found.ttft.p99 or 0:.2f} s, {failed} failed"
        )
        if out is not None:
            out.write_text(json.dumps(to_json(Comparison(setting, tuple(trials.done.values())))) + "\n")

    trials = Trials(setting, options.say, keep)
    for slow in (None, *slows):
        run_grid(trials, contestants, *grid, slow)
    rows = find_limits(trials, contestants, grid[1], limits, options.say) if limits else []
    found = Comparison(setting, tuple(trials.done.values()), tuple(rows))
    if out is not None:
        out.write_text(json.dumps(to_json(found)) + "\n")
    if as_json:
        typer.echo(json.dumps(to_json(found), indent=2))
        return
    for shown in tables(found):
        Console(width=170).print(shown)
    for text in warnings(found.trials):
        typer.echo(f"warning: {text}")
    typer.echo("conditions: " + json.dumps(to_json(found)["conditions"] | found.trials[0].conditions))


def _listed(flag: str, text: str, kind: Callable[[str], _Value]) -> list[_Value]:
    """Return the values of a list with commas; raises `UserError`."""
    from pdcluster.errors import UserError

    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} {text}: must be values with commas between them, such as 1,2,3") from None


def _speed(text: str) -> float:
    speed = float(text)
    if not 0 < speed < float("inf"):
        raise ValueError(text)
    return speed


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that engines and routers are ended; the exit code is a shell's for it."""
    import signal
    import sys

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
