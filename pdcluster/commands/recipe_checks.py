"""`recipe verify` and `recipe lint`: recipes against golden cases, and against vLLM's own parser."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdcluster.commands import options
from pdcluster.commands.recipe_options import Recipes, open_library

if TYPE_CHECKING:
    from pdcluster.recipe_lint import Lint
    from pdcluster.recipes.golden import Verdict

_MOST_SHOWN = 20
VERIFY_EXAMPLES = """\b
Examples:
  pdcluster recipe verify golden.jsonl.gz --recipes ~/recipes
  pdcluster recipe verify golden.jsonl.gz --recipes ~/recipes --json"""
LINT_EXAMPLES = """\b
Examples:
  pdcluster recipe lint ~/recipes
  pdcluster recipe lint ~/recipes --json > lint.json"""


def verify(
    cases: Annotated[Path, typer.Argument(metavar="FILE", help="Golden cases: JSON lines, gzipped or not.")],
    recipes: Recipes = None,
    as_json: options.Json = False,
) -> None:
    """Compare what we resolve with golden cases: exact, deviating by a named rule, or unexplained.

    Exit code 0 where no difference is unexplained, 1 otherwise.
    """
    from pdcluster.recipes.golden import read_cases
    from pdcluster.recipes.golden import verify as run

    listed = read_cases(cases)
    options.say(f"resolving {len(listed)} cases")
    verdict = run(listed, open_library(recipes))
    typer.echo(json.dumps(verdict.to_json(), indent=2) if as_json else _text(verdict))
    if verdict.unexplained:
        raise typer.Exit(1)


def _text(verdict: Verdict) -> str:
    deviating = sum(found.count for found in verdict.deviations.values())
    lines = [
        f"total        {verdict.total:>7,}",
        f"exact        {verdict.exact:>7,}",
        f"deviations   {deviating:>7,}",
        *(f"  {rule:<24}{found.count:>6,}  {found.reason}" for rule, found in sorted(verdict.deviations.items())),
        f"unexplained  {len(verdict.unexplained):>7,}",
    ]
    lines += [f"  {json.dumps(item)}" for item in verdict.unexplained[:_MOST_SHOWN]]
    if len(verdict.unexplained) > _MOST_SHOWN:
        lines.append(f"  ... and {len(verdict.unexplained) - _MOST_SHOWN} more; --json has them all")
    return "\n".join(lines)


def lint(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Recipes to check.", show_default="the shipped ones"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Parse every command that recipes can give with the installed vLLM; list each failure with its cause.

    Exit code 0 where all are accepted, 1 otherwise.
    """
    from pdcluster.recipe_lint import lint as run

    found = run(open_library(directory), os.environ, options.say)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(_lint_lines(found)))
    if found.failures:
        raise typer.Exit(1)


def _lint_lines(found: Lint) -> list[str]:
    lines = []
    for failure in found.failures:
        lines += [f"{failure.cause}: {failure.where}", f"  {failure.message}"]
        lines.append(f"  {failure.hint}; {failure.commands} commands, such as {failure.example}")
    lines += [f"floor: {line}" for line in found.floors]
    lines += [f"warning: {line}" for line in found.warnings]
    counts: dict[str, int] = {}
    for failure in found.failures:
        counts[failure.cause] = counts.get(failure.cause, 0) + failure.commands
    told = "".join(f", {count:,} {cause}" for cause, count in sorted(counts.items()))
    refused = f"{found.commands - found.accepted:,} refused{told.replace(',', ':', 1)}" if counts else "none refused"
    lines.append(f"vLLM {found.vllm}: {found.recipes} recipes, {found.commands:,} commands, {refused}")
    return lines
