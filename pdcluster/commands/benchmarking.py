"""`bench proxy`: what the proxy costs, against another router, measured here and now; the table of benchmarks."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pdcluster.commands import fitting, options, replaying, scheduling

bench = typer.Typer(
    no_args_is_help=True,
    help="Benchmarks: our proxy against other routers, and traces against any endpoint.",
    rich_markup_mode=None,
    epilog="\b\nExamples:\n  pdcluster bench proxy\n"
    "  pdcluster bench replay URL TRACE --speed 3.5\n  pdcluster bench scheduling TRACE --engines FILE\n"
    "  pdcluster bench engine URL --out engine.json",
)
_EPILOG = """\b
Examples:
  pdcluster bench proxy
  pdcluster bench proxy --cases paced,burst --rounds 5
  pdcluster bench proxy --scale 0.1 --peer none --json"""

Rounds = Annotated[int, typer.Option(min=1, max=100, help="How often each case runs on each router.")]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Processes of our proxy.")]
Scale = Annotated[float, typer.Option(min=0.001, max=100, help="Share of the usual number of requests.")]
Cases = Annotated[str | None, typer.Option(help="Some of: paced,burst,plain,large,giant.", show_default="all")]
Peer = Annotated[Literal["vllm-router", "none"], typer.Option(help="Compare with vllm-router, or with none.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 where an aim is missed.")]


@bench.callback()
def _group() -> None:
    """Benchmarks."""


bench.command(epilog=replaying.EPILOG)(replaying.replay)
bench.command(epilog=scheduling.EPILOG)(scheduling.scheduling)
bench.command(epilog=fitting.EPILOG)(fitting.engine)


@bench.command(epilog=_EPILOG)
def proxy(
    rounds: Rounds = 3,
    workers: Workers = 1,
    scale: Scale = 1.0,
    cases: Cases = None,
    peer: Peer = "vllm-router",
    as_json: options.Json = False,
    check: Check = False,
) -> None:
    """Put the same load on our proxy and on vllm-router, in turn, in front of stand-in engines; print the ratios."""
    import json

    from rich.console import Console

    from pdcluster.bench.cases import CASES, scaled
    from pdcluster.bench.report import conditions, make_rows, table, to_json, told
    from pdcluster.bench.routers import PEER_VERSION, find_vllm_router
    from pdcluster.bench.runs import run_all
    from pdcluster.errors import LaunchError, UserError

    names = [case.name for case in CASES]
    chosen = cases.split(",") if cases else names
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise UserError(f"--cases {unknown[0]}: there is no such case; there are {', '.join(names)}")
    if peer != "none":
        find_vllm_router()
    picked = [scaled(case, scale) for case in CASES if case.name in chosen]
    runs = run_all(picked, rounds, workers, options.say, peer=peer != "none")
    rows = make_rows(picked, runs)
    other = f"vllm-router {PEER_VERSION}" if peer != "none" else "none"
    held = conditions(picked, rounds, scale, workers, other)
    if as_json:
        typer.echo(json.dumps(to_json(rows, held), indent=2))
    else:
        Console(width=150).print(table(rows))
        typer.echo(told(held))
    missed = [row.figure for row in rows if row.met is False]
    if check and missed:
        raise LaunchError(f"aims missed: {', '.join(missed)}")
