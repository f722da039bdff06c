"""`recipe list | show | resolve | diff`: what recipes hold, and what becomes of one choice."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdcluster.commands import options
from pdcluster.commands.recipe_checks import VERIFY_EXAMPLES, verify
from pdcluster.commands.recipe_options import BelowFloor, Model, Recipes, Requested, open_library, takes_request

if TYPE_CHECKING:
    from pdcluster.recipes.deployment import Deployment
    from pdcluster.recipes.library import Library
    from pdcluster.recipes.request import Request

recipe = typer.Typer(
    no_args_is_help=True,
    help="Recipes: published serving settings, resolved into commands with the origin of each setting.",
    rich_markup_mode=None,
    epilog="\b\nExamples:\n  pdcluster recipe list\n  pdcluster recipe show moonshotai/Kimi-K3",
)
_LIST_EXAMPLES = "\b\nExamples:\n  pdcluster recipe list\n  pdcluster recipe list kimi --recipes ~/recipes --json"
_SHOW_EXAMPLES = (
    "\b\nExamples:\n  pdcluster recipe show moonshotai/Kimi-K3\n  pdcluster recipe show moonshotai/Kimi-K3 --json"
)
_RESOLVE_EXAMPLES = """\b
Examples:
  pdcluster recipe resolve moonshotai/Kimi-K3
  pdcluster recipe resolve moonshotai/Kimi-K3 --variant nvfp4 --hardware gb300 --strategy pd_cluster
  pdcluster recipe resolve moonshotai/Kimi-K3 --hardware h200 --explain --max-num-seqs
  pdcluster recipe resolve moonshotai/Kimi-K3 --hardware b300 --feature reasoning --shell"""
_DIFF_EXAMPLES = """\b
Examples:
  pdcluster recipe diff moonshotai/Kimi-K3 hardware=b300 hardware=b300,variant=nvfp4
  pdcluster recipe diff moonshotai/Kimi-K3 hardware=h200,strategy=pd_cluster hardware=gb300,strategy=pd_cluster"""


@recipe.callback()
def _group() -> None:
    """Recipes."""


@recipe.command("list", epilog=_LIST_EXAMPLES)
def list_recipes(
    word: Annotated[str, typer.Argument(help="Only ids that contain it.", show_default=False)] = "",
    recipes: Recipes = None,
    as_json: options.Json = False,
) -> None:
    """List recipes: variants, strategies, oldest vLLM."""
    from pdcluster.recipes.summary import summarise

    library = open_library(recipes)
    found = [summarise(library, model) for model in library.models() if word.lower() in model.lower()]
    _warn(library)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for item in found:
        typer.echo(f"{item['model']:<52} vLLM {item['minimum_vllm'] or '?':<9} {', '.join(item['variants'])}")
    options.say(f"{len(found)} recipes in {library.root}")


@recipe.command(epilog=_SHOW_EXAMPLES)
def show(model: Model, recipes: Recipes = None, as_json: options.Json = False) -> None:
    """Show what a recipe offers: variants, hardware, strategies, features, floors, sources."""
    from pdcluster.recipes.summary import describe

    library = open_library(recipes)
    found = describe(library, model)
    _warn(library)
    typer.echo(json.dumps(found, indent=2, default=str) if as_json else "\n".join(_lines(found)))


@recipe.command(epilog=_RESOLVE_EXAMPLES)
@takes_request
def resolve(
    request: Requested,
    *,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="FLAG", help="One setting's history only.", show_default=False)
    ] = None,
    below_floor: BelowFloor = False,
    shell: Annotated[bool, typer.Option("--shell", help="Print the commands for a POSIX shell.")] = False,
    recipes: Recipes = None,
    as_json: options.Json = False,
) -> None:
    """Resolve one choice into the command of every node, each setting with its origin. Exit code 2 where refused."""
    from pdcluster.recipes.explaining import explain_lines, shell_line, table_lines

    deployment = _deploy(open_library(recipes), request, below_floor=below_floor)
    if explain is not None:
        typer.echo("\n".join(explain_lines(deployment.commands, explain)))
    elif as_json:
        typer.echo(json.dumps(deployment.to_json(), indent=2))
    elif shell:
        for command in deployment.commands:
            typer.echo(f"# {command.name}\n{shell_line(command)}")
    else:
        typer.echo("\n".join(table_lines(deployment.commands)))


@recipe.command(epilog=_DIFF_EXAMPLES)
def diff(
    model: Model,
    left: Annotated[str, typer.Argument(metavar="LEFT", help="KEY=VALUE,...: the keys are those of `resolve`.")],
    right: Annotated[str, typer.Argument(metavar="RIGHT", help="Likewise.")],
    recipes: Recipes = None,
    as_json: options.Json = False,
) -> None:
    """Put two choices of a recipe side by side: settings that differ, with both origins. Exit code 1 where any does."""
    from pdcluster.recipes.explaining import differences

    library = open_library(recipes)
    sides = [_deploy(library, _parse_choice(model, text), below_floor=True) for text in (left, right)]
    found = differences(*(side.commands for side in sides))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for row in found:
            typer.echo(f"{row['command']}  {row['setting']}")
            typer.echo(f"  - {row['left'] or '(absent)'}    {row['left_origin'] or ''}".rstrip())
            typer.echo(f"  + {row['right'] or '(absent)'}    {row['right_origin'] or ''}".rstrip())
    options.say(f"{len(found)} settings differ")
    if found:
        raise typer.Exit(1)


recipe.command(epilog=VERIFY_EXAMPLES)(verify)


def _deploy(library: Library, request: Request, *, below_floor: bool) -> Deployment:
    from pdcluster.recipes.deployment import deploy
    from pdcluster.recipes.request import complete

    completed = complete(library, request)
    deployment = deploy(library, completed.choice)
    _warn(library)
    if completed.assumed:
        options.say(f"taken by default: {', '.join(completed.assumed)}")
    for finding in (*deployment.of_kind("correction"), *deployment.of_kind("warning")):
        options.say(f"{finding.kind}: {finding}")
    deployment.refuse(below_floor=below_floor)
    return deployment


def _parse_choice(model: str, text: str) -> Request:
    """Read `variant=nvfp4,hardware=gb300,feature=reasoning`."""
    from pdcluster.errors import UserError
    from pdcluster.recipes.names import unknown
    from pdcluster.recipes.request import Request

    singles = ("variant", "hardware", "strategy", "kv_offload", "kv_store", "prefill_parallelism", "decode_parallelism")
    counts = ("nodes", "prefill_nodes", "decode_nodes", "gpus_per_node")
    given: dict[str, Any] = {"features": (), "without": ()}
    for part in filter(None, text.split(",")):
        key, equals, value = part.strip().partition("=")
        key = {"feature": "features"}.get(key.replace("-", "_"), key.replace("-", "_"))
        if not equals:
            raise UserError(f"{part}: KEY=VALUE is needed, such as hardware=gb300")
        if key in ("features", "without"):
            given[key] += (value,)
        elif key in counts and value.isdigit():
            given[key] = int(value)
        elif key in singles:
            given[key] = value
        elif key in counts:
            raise UserError(f"{part}: a whole number is needed")
        else:
            raise UserError(unknown("key", key, (*singles, *counts, "feature", "without")))
    return Request(model, **given)


def _warn(library: Library) -> None:
    for warning in library.warnings():
        options.say(f"warning: {warning}")


def _lines(value: Any, indent: str = "") -> list[str]:
    """Lay plain data out as indented text."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{key}", *_lines(item, indent + "  ")]
        else:
            shown = ", ".join(map(str, item)) if isinstance(item, list) else "unknown" if item is None else item
            lines.append(f"{indent}{key:<22} {shown}".rstrip())
    return lines
