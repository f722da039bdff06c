"""`recipe verify`: recipes against what others made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdcluster.commands import options
from pdcluster.commands.recipe_options import Recipes, open_library

if TYPE_CHECKING:
    from pdcluster.recipes.golden import Verdict

_MOST_SHOWN = 20
VERIFY_EXAMPLES = """\b
Examples:
  pdcluster recipe verify golden.jsonl.gz --recipes ~/recipes
  pdcluster recipe verify golden.jsonl.gz --recipes ~/recipes --json"""


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
