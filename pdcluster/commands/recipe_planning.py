"""What `plan` prints for a recipe: pools, every node's command, the proxy; a table of all combinations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from pdcluster.commands import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdcluster.plan import Instance, Plan
    from pdcluster.recipes.matrix import Cell
    from pdcluster.spec import PoolSpec, RecipeSpec
    from pdcluster.spec_loading import LoadedSpec


def print_table(recipe: RecipeSpec, *, as_json: bool) -> None:
    """Print whether each variant, hardware and strategy resolves, and why not where it doesn't."""
    from pdcluster.recipe_layer import open_recipes
    from pdcluster.recipes.matrix import matrix

    cells = list(matrix(open_recipes(recipe), recipe.id))
    if as_json:
        typer.echo(json.dumps([cell.to_json() for cell in cells], indent=2))
    else:
        typer.echo("\n".join(table_lines(cells)))


def table_lines(cells: list[Cell]) -> Iterator[str]:
    """Yield a line for each combination, and a count."""
    widths = [max(len(getattr(cell, name)) for cell in cells) for name in ("variant", "hardware", "strategy")]
    for cell in cells:
        names = "  ".join(
            text.ljust(width) for text, width in zip((cell.variant, cell.hardware, cell.strategy), widths, strict=True)
        )
        instead = f"; {cell.instead}" if cell.instead else ""
        yield f"{names}  {'resolves' if cell.resolves else 'refused '}  {cell.told}{instead}"
    resolved = sum(cell.resolves for cell in cells)
    yield f"{len(cells)} combinations: {resolved} resolve, {len(cells) - resolved} are refused with a reason"


def print_commands(recipe: RecipeSpec, nodes: int | None, *, as_json: bool, shell: bool) -> None:
    """Print a recipe's commands where they cannot become a plan: no pools, or sizes that are variables yet."""
    from dataclasses import replace

    from pdcluster.recipe_layer import open_recipes, request_of
    from pdcluster.recipes.choice import PD
    from pdcluster.recipes.deployment import deploy
    from pdcluster.recipes.explaining import shell_line
    from pdcluster.recipes.explaining import table_lines as command_lines
    from pdcluster.recipes.request import complete

    library = open_recipes(recipe)
    completed = complete(library, replace(request_of(recipe, {}, recipe.strategy or PD), nodes=nodes))
    deployment = deploy(library, completed.choice)
    deployment.refuse(below_floor=recipe.below_floor, any_strategy=recipe.any_strategy)
    for finding in (*deployment.of_kind("correction"), *deployment.of_kind("warning")):
        options.say(f"{finding.kind}: {finding}")
    if as_json:
        typer.echo(json.dumps(deployment.to_json(), indent=2))
    elif shell:
        typer.echo("\n".join(f"# {command.name}\n{shell_line(command)}" for command in deployment.commands))
    else:
        typer.echo("\n".join(command_lines(deployment.commands)))
    if completed.choice.strategy == PD:
        options.say("$GPUS_PER_NODE: no source says how many devices a node has; --gpus-per-node makes this a plan")
    else:
        options.say(f"{completed.choice.strategy} has no prefill and decode pools; `launch` starts pd_cluster")


def print_hosts(made: Plan, loaded: LoadedSpec) -> None:
    """Print a plan whose instances have hosts of their own."""
    typer.echo("\n".join(host_lines(made, loaded)))


def host_lines(made: Plan, loaded: LoadedSpec) -> Iterator[str]:
    """Yield the pools in short, the first node of each pool in full, of the others what differs, and the proxy."""
    yield f"{made.name}: {made.served_model_name}"
    for role, pool in loaded.spec.pools.items():
        yield f"{role:<8} {pool.replicas} x {pool_shape(pool)}"
    first: dict[str, Instance] = {}
    for program in sorted((*made.instances, *made.followers), key=lambda item: (item.role != "prefill", item.name)):
        known = first.setdefault(program.role, program)
        yield ""
        serving = f"serves {program.url}" if program in made.instances else "follows the instance's first node"
        yield f"{program.name} on {program.host}: {serving}" + ("" if program is known else f"; as {known.name}, but")
        seen = set() if program is known else set(_rows(known))
        yield from (f"  {text:<58} {origin}" for text, origin in _rows(program) if (text, origin) not in seen)
    yield ""
    yield f"proxy: {made.proxy.url}"
    yield f"  {made.proxy.shell(variables=True)}"
    for note in made.notes:
        yield f"note: {note}"


def pool_shape(pool: PoolSpec) -> str:
    """Return a pool's layout in words: nodes, parallel sizes, context parallelism, speculation."""
    sizes = {
        "TP": pool.tensor_parallel_size,
        "PP": pool.pipeline_parallel_size,
        "DP": pool.data_parallel_size,
        "DCP": pool.decode_context_parallel_size,
        "PCP": pool.prefill_context_parallel_size,
    }
    parts = [f"{pool.nodes} node{'s' if pool.nodes > 1 else ''}"]
    parts += [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["TP 1"]
    parts += ["experts over all ranks"] if pool.enable_expert_parallel else []
    if pool.speculative is not None:
        drafted = pool.speculative.num_speculative_tokens
        parts.append(f"{pool.speculative.method or 'draft'}" + (f" of {drafted} tokens" if drafted else ""))
    return ", ".join(parts)


def _rows(program: Instance) -> list[tuple[str, str]]:
    rows = [(" ".join(argument.tokens), argument.origin) for argument in program.arguments]
    shown = program.shown_environment()
    return rows + [(f"{item.name}={shown[item.name]}", item.origin) for item in program.environment]


def explain_plan(made: Plan, loaded: LoadedSpec, name: str) -> None:
    """Print one setting's history: what each pool's first program has, where it is from, and the recipe's layers."""
    from pdcluster.errors import UserError
    from pdcluster.flags import normalise
    from pdcluster.recipes.explaining import explain_lines

    flag = normalise(name if name.startswith("-") else f"--{name}")
    lines = []
    for role in ("prefill", "decode"):
        program = made.of_role("prefill" if role == "prefill" else "decode")[0]
        found = [row for row in _rows(program) if row[0].split(" ")[0] == flag or row[0].startswith(f"{name}=")]
        lines += [f"{role} pool: {text}\n  from {origin}" for text, origin in found]
    if loaded.recipe is not None:
        try:
            lines += ["in the recipe:", *explain_lines(loaded.recipe.deployment.commands, name)]
        except UserError:
            lines += ["the recipe does not set it"] if lines else []
    if not lines:
        raise UserError(f"setting {name}: no program of the plan has it")
    typer.echo("\n".join(lines))
