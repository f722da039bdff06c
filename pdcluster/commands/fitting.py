"""`bench engine`: measure an engine, and fit the profile that `simulate` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdcluster.commands import options, replaying

EPILOG = """\b
Examples:
  pdcluster bench engine http://127.0.0.1:8200 --out engine.json
  pdcluster bench engine http://127.0.0.1:8200 --max-prompt 2048 --max-batch 16 --chunk-tokens 2048 --json
  pdcluster simulate --profile engine.json
The engine should be idle, and alone on its devices. Transfers are not measured: --base has them."""

Url = Annotated[str, typer.Argument(help="One engine, not a router, with or without /v1.")]
Out = Annotated[Path | None, typer.Option(help="Write the profile here.", show_default=False)]
Base = Annotated[
    Path | None, typer.Option(help="Profile with what is not measured.", show_default="the reference engine")
]
MaxPrompt = Annotated[int, typer.Option(min=128, help="Longest prompt.")]
MaxBatch = Annotated[int, typer.Option(min=1, help="Most sequences at once; no more than the engine has seats for.")]
Seats = Annotated[int | None, typer.Option("--max-num-seqs", min=1, help="The engine's.", show_default="the base's")]
Chunk = Annotated[
    int | None, typer.Option("--chunk-tokens", min=1, help="Its max_num_batched_tokens.", show_default="the base's")
]
Steps = Annotated[int, typer.Option(min=16, max=512, help="Tokens of an answer in a batch.")]
Repeats = Annotated[int, typer.Option(min=1, help="How often each point is measured.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for a request.")]
Seed = Annotated[int, typer.Option(help="Of the prompts; another where the engine may have these cached.")]


def engine(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    url: Url,
    out: Out = None,
    base: Base = None,
    model: replaying.Model = None,
    api_key_env: replaying.KeyEnv = None,
    max_prompt: MaxPrompt = 8192,
    max_batch: MaxBatch = 32,
    max_num_seqs: Seats = None,
    chunk_tokens: Chunk = None,
    steps: Steps = 48,
    repeats: Repeats = 3,
    timeout: Timeout = 120.0,
    seed: Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Measure an engine's prefill and decode through its API; fit a profile, and state the fit's error."""
    import asyncio
    import json
    import time
    from dataclasses import asdict, replace

    from pdcluster.bench.engine_fit import fit_profile, forecasts
    from pdcluster.bench.engine_probe import Probe, Sweep
    from pdcluster.replay.exchange import parse_target
    from pdcluster.replay.replaying import find_model
    from pdcluster.simulation.profile import EngineProfile, load_profile, save_profile

    replaying.writable(out)
    known = load_profile(base) if base is not None else EngineProfile()
    if chunk_tokens is not None:
        known = replace(known, chunk_tokens=chunk_tokens, prefill_batch=max_num_seqs or known.max_num_seqs)
    if max_num_seqs is not None:
        known = replace(known, max_num_seqs=max_num_seqs)
    target = parse_target(url, replaying.read_key(api_key_env))
    sweep = Sweep(max_prompt, min(max_batch, known.max_num_seqs), steps, repeats, timeout, seed)
    probe = Probe(target, model or find_model(target), sweep, time.perf_counter, options.say)
    measured = asyncio.run(probe.run())
    profile = fit_profile(measured, known)
    if out is not None:
        save_profile(profile, out)
    points = forecasts(measured, profile)
    if as_json:
        typer.echo(json.dumps({"profile": asdict(profile), "points": [asdict(point) for point in points]}, indent=2))
        return
    for point in points:
        ms = f"{1000 * point.measured:10.2f} ms measured, {1000 * point.fitted:10.2f} ms fitted"
        typer.echo(f"{point.what:>34}: {ms}, {point.error:+.1%}")
    if profile.fit is not None:
        fit = profile.fit
        typer.echo(
            f"mean error: prefill {fit.prefill_error:.1%}, decode {fit.decode_error:.1%}; "
            f"worst {fit.worst:.1%} of {fit.points} points; not measured: seats, transfers, lease"
        )
