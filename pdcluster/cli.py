"""The command line: verbs, exit codes, and errors without tracebacks. Heavy imports wait until a verb runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import typer

from pdcluster.commands import benchmarking, diagnosing, launching, lifecycle, planning, recipes, simulating
from pdcluster.errors import PdclusterError

_BUG = 3
_INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Serve LLMs with separate vLLM prefill and decode pools behind one OpenAI-compatible endpoint.",
    epilog="Try: pdcluster launch --prefill 1 --decode 1 --model tiny",
)
_EXAMPLES: Mapping[Callable[..., None], tuple[str, ...]] = {
    launching.launch: (
        "pdcluster launch --prefill 2 --decode 4",
        "pdcluster launch --prefill 1 --decode 1 --model tiny --port 8000",
        "pdcluster launch --config cluster.yaml --detach",
        "pdcluster launch --model Qwen/Qwen3-8B --set pools.decode.tensor_parallel_size=2",
        "pdcluster launch --recipe moonshotai/Kimi-K3 --variant nvfp4 --hardware gb300 --prefill 2 --decode 4",
    ),
    planning.plan: (
        "pdcluster plan --prefill 2 --decode 4",
        "pdcluster plan --config cluster.yaml --json",
        "pdcluster plan --set pools.decode.tensor_parallel_size=2 --shell",
        "pdcluster plan --recipe moonshotai/Kimi-K3 --variant nvfp4 --hardware gb300 --prefill 2 --decode 4",
        "pdcluster plan --recipe moonshotai/Kimi-K3 --hardware b300 --strategy single_node_tp",
        "pdcluster plan --recipe moonshotai/Kimi-K3 --strategy all",
    ),
    planning.check: ("pdcluster check --config cluster.yaml", "pdcluster check --prefill 2 --decode 4 --model tiny"),
    lifecycle.status: ("pdcluster status", "pdcluster status --name trial --json"),
    lifecycle.logs: ("pdcluster logs decode-0", "pdcluster logs -f"),
    lifecycle.down: ("pdcluster down", "pdcluster down --name trial --grace 5"),
    diagnosing.doctor: ("pdcluster doctor",),
    diagnosing.models: ("pdcluster models",),
    simulating.simulate: (
        "pdcluster simulate --prefill 4 --decode 8 --port-base 9000",
        "pdcluster simulate --profile engine.json --kv-events --json",
        "pdcluster simulate --virtual --trace conversation_trace.jsonl.gz --speed 3.5 --from 600 --to 960",
        "pdcluster simulate --virtual --trace trace.jsonl.gz --router my_router:Mine --slow decode-0=5 --json",
    ),
    planning.schema: ("pdcluster schema > cluster.schema.json",),
}


def _epilog(examples: Sequence[str]) -> str:
    """Lay examples out one a line; the mark keeps the help from joining them."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)


for _verb, _examples in _EXAMPLES.items():
    app.command(epilog=_epilog(_examples))(_verb)

app.add_typer(benchmarking.bench, name="bench")
app.add_typer(recipes.recipe, name="recipe")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def proxy(context: typer.Context) -> None:
    """Run the endpoint alone, in front of engines that somebody else started (`pdcluster proxy --help`)."""
    # The proxy is a program of its own: neither package imports the other.
    os.execv(sys.executable, [sys.executable, "-m", "proxy", *context.args])  # noqa: S606 - no shell wanted


def main() -> NoReturn:
    """Run the command line; errors become one message and an exit code (see `pdcluster.errors`)."""
    try:
        app()
    except PdclusterError as error:
        lines = str(error).splitlines() or [type(error).__name__]
        typer.echo("\n".join(f"error: {line}" if index == 0 else line for index, line in enumerate(lines)), err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 - the last line of defence
        _report_bug(error)
    sys.exit(0)


def _report_bug(error: Exception) -> NoReturn:
    """Save the traceback for a report and say where; a person sees one line."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="pdcluster-bug-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    typer.echo(f"error: this is a bug in pdcluster: {type(error).__name__}: {error}; details: {file.name}", err=True)
    sys.exit(_BUG)
