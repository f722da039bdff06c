"""`bench replay`: a request trace against any OpenAI endpoint, and what its users would have seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pdcluster.commands import options

if TYPE_CHECKING:
    from pdcluster.replay.figures import Targets
    from pdcluster.replay.replaying import Replay
    from pdcluster.replay.report import Known
    from pdcluster.replay.trace import Shape, Trace, Window

_MS = 1000
EPILOG = """\b
Examples:
  pdcluster bench replay http://127.0.0.1:8000 conversation_trace.jsonl.gz --speed 3.5 --from 600 --to 960
  pdcluster bench replay http://127.0.0.1:8000 trace.jsonl --max-output 200 --json --out replay.json --svg replay.svg
  pdcluster bench replay https://llm.example trace.jsonl --model m --api-key-env LLM_KEY --ttft-ms 800
A trace has one JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens)."""

Url = Annotated[str, typer.Argument(help="The endpoint, with or without /v1.")]
TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines, gzip or not.")]
Speed = Annotated[float, typer.Option(min=0.001, help="How much faster than the trace.")]
Begin = Annotated[float, typer.Option("--from", min=0, help="Second of the trace to begin at.")]
End = Annotated[float | None, typer.Option("--to", help="Second of the trace to end before.", show_default="its last")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Cut outputs at so many tokens.", show_default="no cut")]
MaxInput = Annotated[int | None, typer.Option(min=1, help="Leave longer prompts out.", show_default="none left out")]
BlockTokens = Annotated[
    int, typer.Option(min=1, max=512, help="Tokens for 512 of the trace's inputs: less for a short context.")
]
Spread = Annotated[float, typer.Option(min=0, help="Move arrivals by up to so many of the trace's seconds.")]
Seed = Annotated[int, typer.Option(help="Order within a timestamp, spread, and words of prompts.")]
TtftMs = Annotated[float, typer.Option(min=0, help="Target for the first token.")]
TtftPerToken = Annotated[float, typer.Option("--ttft-per-token-ms", min=0, help="More of it a prompt token beyond.")]
TtftFree = Annotated[int, typer.Option("--ttft-free-tokens", min=0, help="Prompt tokens that get no more of it.")]
TpotMs = Annotated[float, typer.Option(min=0, help="Target for each token after the first.")]
Model = Annotated[str | None, typer.Option(help="Name of the model.", show_default="the first that is listed")]
Revision = Annotated[str | None, typer.Option(help="Revision of the model, for the record.", show_default="unknown")]
CacheState = Annotated[str | None, typer.Option(help="State of caches, for the record.", show_default="unknown")]
KeyEnv = Annotated[str | None, typer.Option("--api-key-env", metavar="NAME", help="Variable that has the API key.")]
Api = Annotated[Literal["chat", "completions"], typer.Option(help="Which API is asked.")]
Whole = Annotated[bool, typer.Option("--whole-output", help="Send ignore_eos; shorter answers count as failed.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for a request.")]
InFlight = Annotated[int, typer.Option(min=1, help="At most so many at once; more are not sent, and failed.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Small requests before the start.")]
Out = Annotated[Path | None, typer.Option(help="Write JSON with every request here.", show_default=False)]
Svg = Annotated[Path | None, typer.Option(help="Draw latencies over time here.", show_default=False)]


def replay(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    url: Url,
    trace: TracePath,
    speed: Speed = 1.0,
    begin: Begin = 0.0,
    end: End = None,
    max_output: MaxOutput = None,
    max_input: MaxInput = None,
    block_tokens: BlockTokens = 512,
    spread: Spread = 0.0,
    seed: Seed = 0,
    ttft_ms: TtftMs = 500.0,
    ttft_per_token_ms: TtftPerToken = 0.25,
    ttft_free_tokens: TtftFree = 2000,
    tpot_ms: TpotMs = 30.0,
    model: Model = None,
    revision: Revision = None,
    cache_state: CacheState = None,
    api_key_env: KeyEnv = None,
    api: Api = "chat",
    whole_output: Whole = False,
    timeout: Timeout = 120.0,
    max_in_flight: InFlight = 5000,
    warm_up: WarmUp = 1,
    as_json: options.Json = False,
    out: Out = None,
    svg: Svg = None,
) -> None:
    """Replay a trace in an open loop, prefix sharing kept; print latencies, goodput and conditions."""
    from pdcluster.replay.driver import Limits
    from pdcluster.replay.exchange import parse_target
    from pdcluster.replay.figures import Targets
    from pdcluster.replay.prompts import Prompts
    from pdcluster.replay.replaying import Asking, Replay, find_model
    from pdcluster.replay.report import Known
    from pdcluster.replay.trace import Shape, read_trace

    window = window_of(begin, end)
    for path in (out, svg):
        writable(path)
    target = parse_target(url, read_key(api_key_env))
    read = read_trace(trace, window)
    how = Replay(
        target,
        Asking(model or find_model(target), api, whole_output),
        Prompts(seed, block_tokens),
        Limits(timeout, max_in_flight, whole_output),
        warm_up,
    )
    shape = Shape(speed, max_output, max_input, block_tokens, spread, seed)
    targets = Targets(ttft_ms / _MS, ttft_per_token_ms / _MS, ttft_free_tokens, tpot_ms / _MS)
    _run(read, shape, how, targets, Known(url, revision, cache_state), as_json, out, svg)


def _run(
    trace: Trace,
    shape: Shape,
    how: Replay,
    targets: Targets,
    known: Known,
    as_json: bool,
    out: Path | None,
    svg: Path | None,
) -> None:
    """Drive, then say and write what was found."""
    import json

    from rich.console import Console

    from pdcluster.replay.figures import make_figures
    from pdcluster.replay.picture import draw
    from pdcluster.replay.replaying import run_replay
    from pdcluster.replay.report import conditions, sentences, table, to_json
    from pdcluster.replay.trace import shaped

    schedule = shaped(trace, shape)
    options.say(f"{len(schedule.arrivals)} of {trace.total} requests in {schedule.seconds:.0f} s, to {known.url}")
    run = run_replay(how, schedule, options.say)
    found = make_figures(run, targets)
    told = conditions(known, trace, shape, schedule, how, found)
    if out is not None:
        out.write_text(json.dumps(to_json(found, targets, told, run.records)) + "\n")
    if svg is not None:
        svg.write_text(draw(run.records, targets, f"{trace.name} at speed {shape.speed:g}, {known.url}"))
    if as_json:
        typer.echo(json.dumps(to_json(found, targets, told), indent=2))
        return
    Console(width=120).print(table(found))
    typer.echo("\n".join(sentences(found, targets)))
    typer.echo("conditions: " + json.dumps(told))


def writable(path: Path | None) -> None:
    """Refuse a file that cannot be written before minutes are spent on what should go there."""
    from pdcluster.errors import UserError

    if path is None:
        return
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def window_of(begin: float, end: float | None) -> Window:
    """Return a window; raises `UserError` where it is empty."""
    from pdcluster.errors import UserError
    from pdcluster.replay.trace import Window

    if end is not None and end <= begin:
        raise UserError(f"--to {end:g}: must be later than --from {begin:g}")
    return Window(begin, end)


def read_key(name: str | None) -> str | None:
    """Return the key that a variable has; keys are never arguments, which every user of a machine can see."""
    from pdcluster.errors import UserError

    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise UserError(f"--api-key-env {name}: this variable is not set; export it, or leave the option out")
    return key
