"""`simulate`: engines without a model, in virtual time with a trace and a router, or on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdcluster.commands import options

if TYPE_CHECKING:
    from pdcluster.replay.trace import Shape as Pace
    from pdcluster.simulation.profile import EngineProfile
    from pdcluster.simulation.virtual import Shape

_MS = 1000
_SAID_EVERY = 50_000

Prefill = Annotated[int, typer.Option(min=0, help="Prefill engines.")]
Decode = Annotated[int, typer.Option(min=1, help="Decode engines.")]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="Constants of an engine.", show_default="the reference engine")
]
Slow = Annotated[
    list[str] | None,
    typer.Option(metavar="ENGINE=FACTOR", help="Make one slower, such as decode-0=5.", show_default=False),
]
PortBase = Annotated[int, typer.Option(min=0, max=65535, help="First port, prefill first; 0 is any free ports.")]
KvEvents = Annotated[bool, typer.Option("--kv-events", help="Publish KV events; see /kv_event_sources.")]
Virtual = Annotated[bool, typer.Option("--virtual", help="In virtual time: a trace through a router, nothing sent.")]
TracePath = Annotated[Path | None, typer.Option("--trace", help="Trace for --virtual.", show_default=False)]
RouterName = Annotated[
    str, typer.Option("--router", help="round_robin, least_work, least_work_prefix, or module:Class.")
]
Speed = Annotated[float, typer.Option(min=0.001, help="How much faster than the trace.")]
Begin = Annotated[float, typer.Option("--from", min=0, help="Second of the trace to begin at.")]
End = Annotated[float | None, typer.Option("--to", help="Second of the trace to end before.", show_default="its last")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Cut outputs at so many tokens.", show_default="no cut")]
Spread = Annotated[float, typer.Option(min=0, help="Move arrivals by up to so many of the trace's seconds.")]
Copies = Annotated[int, typer.Option(min=1, help="Overlay so many copies that share no prefixes.")]
Seed = Annotated[int, typer.Option(help="Order within a timestamp, spread, and the router's choices.")]
TtftMs = Annotated[float, typer.Option(min=0, help="Target for the first token.")]
TtftPerToken = Annotated[float, typer.Option("--ttft-per-token-ms", min=0, help="More of it a prompt token beyond.")]
TtftFree = Annotated[int, typer.Option("--ttft-free-tokens", min=0, help="Prompt tokens that get no more of it.")]
TpotMs = Annotated[float, typer.Option(min=0, help="Target for each token after the first.")]


def simulate(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    prefill: Prefill = 4,
    decode: Decode = 8,
    profile: ProfilePath = None,
    slow: Slow = None,
    virtual: Virtual = False,
    trace: TracePath = None,
    router: RouterName = "round_robin",
    speed: Speed = 1.0,
    begin: Begin = 0.0,
    end: End = None,
    max_output: MaxOutput = None,
    spread: Spread = 0.0,
    copies: Copies = 1,
    seed: Seed = 0,
    ttft_ms: TtftMs = 500.0,
    ttft_per_token_ms: TtftPerToken = 0.25,
    ttft_free_tokens: TtftFree = 2000,
    tpot_ms: TpotMs = 30.0,
    port_base: PortBase = 8100,
    kv_events: KvEvents = False,
    as_json: options.Json = False,
) -> None:
    """Simulate engines that behave in time: servers that speak vLLM's protocol, or a trace in virtual time."""
    from pdcluster.errors import UserError
    from pdcluster.replay.figures import Targets
    from pdcluster.replay.trace import Shape as Pace
    from pdcluster.simulation.profile import EngineProfile, load_profile
    from pdcluster.simulation.virtual import Shape

    engine = load_profile(profile) if profile is not None else EngineProfile()
    targets = Targets(ttft_ms / _MS, ttft_per_token_ms / _MS, ttft_free_tokens, tpot_ms / _MS)
    shape = Shape(prefill, decode, engine, targets, seed, _slowed(slow or [], prefill, decode))
    if not virtual:
        if trace is not None:
            raise UserError(
                "--trace: goes with --virtual; `pdcluster bench replay` sends a trace to engines on the wire"
            )
        _serve(shape, port_base, kv_events, as_json)
        return
    if trace is None:
        raise UserError("--virtual: needs a --trace to replay; give JSON lines as `bench replay` takes them")
    window = (begin, end)
    _simulate(shape, trace, window, Pace(speed, max_output, spread=spread, seed=seed), router, copies, as_json)


def _serve(shape: Shape, port_base: int, kv_events: bool, as_json: bool) -> None:
    """Serve until a signal says otherwise."""
    import json
    import time

    import uvloop

    from pdcluster.simulation.server import Served, Serving, served_until_signal
    from pdcluster.simulation.wire_engine import Clocks

    def tell(engines: Served) -> None:
        if as_json:
            typer.echo(json.dumps({"prefill": engines.of("prefill"), "decode": engines.of("decode")}))
        else:
            for name, url in engines.urls.items():
                typer.echo(f"{name:12} {url}")
            legs = [f"--{name.partition('-')[0]} {url}" for name, url in engines.urls.items()]
            options.say(f"serving until Ctrl-C; try: pdcluster proxy {' '.join(legs)}")

    what = Serving(shape.prefill, shape.decode, shape.profile, shape.slow, port_base, kv_events)
    uvloop.run(served_until_signal(what, Clocks(time.monotonic, time.time), tell))


def _simulate(
    shape: Shape,
    path: Path,
    window: tuple[float, float | None],
    pace: Pace,
    router: str,
    copies: int,
    as_json: bool,
) -> None:
    """Run a trace in virtual time, and print what came of it."""
    import dataclasses
    import json
    import os
    import sys
    import time

    from rich.console import Console

    from pdcluster.errors import UserError
    from pdcluster.replay.trace import BLOCK_TOKENS, Window, read_trace, shaped
    from pdcluster.simulation.report import conditions, overlaid, summarize, table, told
    from pdcluster.simulation.router import find_router
    from pdcluster.simulation.virtual import Simulation

    begin, end = window
    if end is not None and end <= begin:
        raise UserError(f"--to {end:g}: must be later than --from {begin:g}")
    if ":" in router:
        sys.path.insert(0, os.fspath(Path.cwd()))  # a user's own is looked for where they stand, as with python -m
    made = find_router(router)
    read = read_trace(path, Window(begin, end))
    schedule = shaped(read, pace)
    arrivals = overlaid(schedule.arrivals, copies, schedule.seconds)
    coarse = dataclasses.replace(shape, profile=_in_blocks_of(shape.profile, BLOCK_TOKENS))
    options.say(f"{len(arrivals)} requests in {schedule.seconds:.0f} s to {shape.prefill} + {shape.decode} engines")
    simulation = Simulation(coarse, made)
    started = time.monotonic()
    outcomes = simulation.run(arrivals, lambda number: _say_progress(number, len(arrivals)))
    spent = time.monotonic() - started
    summary = summarize(outcomes, shape.targets, simulation.engines)
    known = {**conditions(read, pace, coarse, router, copies), "simulated_in_s": round(spent, 2)}
    if as_json:
        typer.echo(json.dumps({**summary.to_json(), "conditions": known}, indent=2))
        return
    Console(width=100).print(table(summary))
    typer.echo(told(summary))
    typer.echo(f"simulated in {spent:.1f} s; conditions: {json.dumps(known)}")


def _in_blocks_of(profile: EngineProfile, tokens: int) -> EngineProfile:
    """Return a profile whose blocks are the trace's: it names no smaller ones."""
    return profile if profile.block_tokens == tokens else profile.with_blocks_of(tokens)


def _say_progress(number: int, total: int) -> None:
    if number and number % _SAID_EVERY < 4096:  # noqa: PLR2004 - it is called so often
        options.say(f"{number} of {total} requests have arrived")


def _slowed(given: list[str], prefill: int, decode: int) -> dict[tuple[str, int], float]:
    """Return which engines are slower, and by what."""
    from pdcluster.errors import UserError

    counts = {"prefill": prefill, "decode": decode}
    slow = {}
    for item in given:
        name, _, factor = item.partition("=")
        role, _, index = name.partition("-")
        try:
            number, times = int(index), float(factor)
        except ValueError:
            raise UserError(f"--slow {item}: must be such as decode-0=5") from None
        if role not in counts or not 0 <= number < counts[role] or times <= 0:
            raise UserError(
                f"--slow {item}: there are prefill-0 to {prefill - 1}, decode-0 to {decode - 1}, factors > 0"
            )
        slow[role, number] = times
    return slow
