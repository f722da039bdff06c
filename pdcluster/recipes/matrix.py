"""Every variant on every hardware with every strategy of one recipe: does it resolve, or what refuses it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdcluster.errors import UserError
from pdcluster.recipes.choice import PD
from pdcluster.recipes.deployment import Deployment, deploy
from pdcluster.recipes.request import Request, complete

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination: whether it resolves, its layout or why it is refused, and what to choose instead."""

    variant: str
    hardware: str
    strategy: str
    resolves: bool
    told: str
    instead: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        fields = ("variant", "hardware", "strategy", "resolves", "told", "instead")
        return {name: getattr(self, name) for name in fields}


def matrix(library: Library, model: str) -> Iterator[Cell]:
    """Yield every combination of a recipe's variants with the library's hardware and strategies, none left out."""
    for variant in library.recipe(model).get("variants") or {}:
        for hardware in library.profiles():
            for strategy in library.strategies():
                yield _cell(library, Request(model, variant=variant, hardware=hardware, strategy=strategy))


def _cell(library: Library, request: Request) -> Cell:
    where = (request.variant or "", request.hardware or "", request.strategy or "")
    try:
        deployment = deploy(library, complete(library, request).choice)
    except UserError as error:
        return Cell(*where, resolves=False, told=str(error))
    refusals = deployment.of_kind("refusal")
    if refusals:
        return Cell(*where, resolves=False, told=refusals[0].what, instead=refusals[0].fix)
    return Cell(*where, resolves=True, told=_layout(deployment))


def _layout(deployment: Deployment) -> str:
    choice = deployment.selection.choice
    if choice.strategy == PD:
        pools = choice.pools or {}
        return ", ".join(f"{role} {pool.nodes} node{'s' if pool.nodes > 1 else ''}" for role, pool in pools.items())
    return f"{choice.nodes} node{'s' if choice.nodes > 1 else ''}"
