"""Names in a recipe that nothing answers to: hardware, strategies, features, modes, variants. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pdcluster.recipes.choice import PD, ROLES
from pdcluster.recipes.documents import Document, KeyPath
from pdcluster.recipes.names import did_you_mean

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library


def dangling(library: Library, recipe: Document) -> Iterator[str]:
    """Yield one line for each name that the taxonomy or the recipe itself doesn't know."""
    profiles = library.profiles()
    hardware = set(profiles)
    keys = hardware | {key for profile in profiles.values() for key in profile.keys} | {"nvidia"}
    features, variants = recipe.get("features") or {}, recipe.get("variants") or {}
    strategies = set(library.strategies())
    places: list[tuple[KeyPath, str, Iterable[str]]] = [
        (("meta", "hardware"), "hardware", hardware),
        (("opt_in_features",), "feature", features),
        (("compatible_strategies",), "strategy", strategies),
        (("strategy_hardware",), "strategy", strategies),
        (("strategy_overrides",), "strategy", strategies),
        (("hardware_opt_in_features",), "hardware", hardware),
        (("hardware_overrides",), "hardware", keys),
        *((("variants", name, "supported_hardware"), "hardware", hardware) for name in variants),
        *((("variants", name, "hardware_overrides"), "hardware", keys) for name in variants),
        *((("variants", name, "default_modes"), "feature", features) for name in variants),
        *((("strategy_hardware", name), "hardware", keys) for name in recipe.get("strategy_hardware") or {}),
        *((("features", name, "strategies"), "strategy", strategies) for name in features),
        *((("strategy_overrides", PD, role, "hardware_overrides"), "hardware", hardware) for role in ROLES),
    ]
    for path, kind, known in places:
        for name in recipe.get(*path) or ():
            if name not in known:
                hint = did_you_mean(str(name), known)
                yield f"{recipe.where(path)}: {kind} {name} is unknown and read by nothing" + (
                    f" ({hint})" if hint else ""
                )
