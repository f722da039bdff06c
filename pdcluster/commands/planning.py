"""`plan`, `schema` and `check`: look before anything starts."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from pdcluster.commands import options

if TYPE_CHECKING:
    from pdcluster.plan import Plan


@options.takes_spec
def plan(
    loaded: options.Loaded,
    *,
    fit_memory: options.FitMemory = False,
    as_json: options.Json = False,
    shell: Annotated[bool, typer.Option("--shell", help="Print the commands for a POSIX shell.")] = False,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Nodes of a strategy without pools.", show_default="least"),
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Plan a recipe for this machine, not for its hardware.")] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="FLAG", help="One setting's history only.", show_default=False)
    ] = None,
) -> None:
    """Print what would run: hosts, devices, ports, arguments, environment. Starts nothing.

    A recipe is planned for the hardware that it names, wherever this runs; --strategy all prints a table.
    """
    from pdcluster.commands.recipe_planning import explain_plan, print_commands, print_hosts, print_table
    from pdcluster.plan import on_own_hosts
    from pdcluster.preflight import prepare_plan

    recipe = loaded.spec.recipe
    if recipe is not None and recipe.strategy == "all":
        print_table(recipe, as_json=as_json)
        return
    if recipe is not None and loaded.recipe is None:
        print_commands(recipe, nodes, as_json=as_json, shell=shell)
        return
    prepared = prepare_plan(loaded, os.environ, options.say, build=False, fit_memory=fit_memory, declared=not here)
    made, own_hosts = prepared.plan, on_own_hosts(loaded, prepared.inventory)
    if explain is not None:
        explain_plan(made, loaded, explain)
    elif as_json:
        typer.echo(json.dumps(made.to_json(), indent=2))
    elif shell:
        for program in (*made.instances, *made.followers, made.proxy):
            typer.echo(f"# {program.name}\n{program.shell(variables=own_hosts)}")
    elif own_hosts:
        print_hosts(made, loaded)
    else:
        _print_table(made)


def schema() -> None:
    """Print the JSON Schema of the cluster spec, for editors and CI."""
    from pdcluster.spec_loading import json_schema

    typer.echo(json_schema())


@options.takes_spec
def check(
    loaded: options.Loaded,
    *,
    fit_memory: options.FitMemory = False,
    as_json: options.Json = False,
) -> None:
    """Check that a spec can start here: rules, memory, ports, packages, and vLLM's own argument parser.

    Starts nothing. Exit code 0 if it can, 2 with every reason if not.
    """
    from pdcluster.preflight import check_ready_to_start, prepare_plan

    prepared = prepare_plan(loaded, os.environ, options.say, build=False, fit_memory=fit_memory)
    check_ready_to_start(prepared, os.environ, options.say)
    if as_json:
        typer.echo(json.dumps({"ok": True, "instances": len(prepared.plan.instances), "notes": prepared.plan.notes}))
        return
    for note in prepared.plan.notes:
        options.say(f"note: {note}")
    typer.echo(f"ok: {len(prepared.plan.instances)} instances can start here")


def _print_table(made: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("instance", "url", "devices", "side channel", title=f"{made.name}: {made.served_model_name}")
    for instance in made.instances:
        where = (
            f"{instance.kind} {','.join(map(str, instance.devices))}"
            if instance.devices
            else (f"{instance.threads} CPU thread{'s' if instance.threads > 1 else ''} ({instance.binding})")
        )
        channel = next(ports for ports in instance.ports if ports.purpose == "nixl side channel")
        last = f"-{channel.ports.stop - 1}" if channel.count > 1 else ""
        table.add_row(instance.name, instance.url, where, f"{channel.first}{last}")
    table.add_row("proxy", made.proxy.url, "", "")
    console.print(table)
    for role in ("prefill", "decode"):
        instance = made.of_role(role)[0]
        console.print(f"\n[bold]{instance.name}[/bold] (its pool differs in ports and devices only)")
        settings = Table("setting", "value", "origin", box=None, pad_edge=False)
        for argument in instance.arguments:
            settings.add_row(argument.tokens[0], " ".join(argument.tokens[1:]), argument.origin)
        shown = instance.shown_environment()
        for variable in instance.environment:
            settings.add_row(variable.name, shown[variable.name], variable.origin)
        console.print(settings)
    for note in made.notes:
        console.print(f"\nnote: {note}")
