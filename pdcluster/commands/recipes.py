"""`recipe`: what the recipe format holds, and what becomes of it."""

from __future__ import annotations

import typer

from pdcluster.commands.recipe_checks import VERIFY_EXAMPLES, verify

recipe = typer.Typer(
    no_args_is_help=True,
    help="Recipes: published serving settings, resolved into commands with the origin of each setting.",
    rich_markup_mode=None,
)


@recipe.callback()
def _group() -> None:
    """Recipes."""


recipe.command(epilog=VERIFY_EXAMPLES)(verify)
