"""What a recipe offers for one variant, as one plain object: the line of an offers file. Pure."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from pdcluster.recipes.choice import PD, ROLES, Choice, Role, Selection
from pdcluster.recipes.documents import Document
from pdcluster.recipes.features import default_features, effective_mode
from pdcluster.recipes.hardware import Count, Profile
from pdcluster.recipes.offers import (
    default_hardware,
    fits_one_node,
    floor_gpus,
    hardware_for,
    minimum_gb,
    pool_modes,
    pool_nodes,
    recommended,
    runs,
    strategies_on,
)
from pdcluster.recipes.topology import single_node_size

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library

# Seen in the published JSON: a pool that would need five nodes isn't rendered.
_MOST_API_NODES = 4


def offer_line(library: Library, model: str, variant: str) -> dict[str, Any]:
    """Return what may be offered for one variant of one recipe."""
    recipe = library.recipe(model)
    profiles = library.profiles().values()
    return {
        "id": f"{model}|{variant}",
        "model": model,
        "variant": variant,
        "model_id": recipe.get("variants", variant, "model_id") or recipe.get("model", "model_id"),
        "default_hardware": default_hardware(recipe, variant, profiles),
        "pd_pool_modes": list(pool_modes(recipe)),
        "hardware": {
            profile.id: _on_hardware(library, recipe, model, variant, profile)
            for profile in hardware_for(recipe, variant, profiles)
        },
    }


def _on_hardware(library: Library, recipe: Document, model: str, variant: str, profile: Profile) -> dict[str, Any]:
    here = strategies_on(recipe, profile)
    best = recommended(recipe, variant, profile)
    choice = Choice(model, "single_node_tp", profile.id, variant)
    selection = Selection(choice, recipe, library.strategy("single_node_tp"), library.taxonomy(), profile, ())
    found: dict[str, Any] = {
        "runs": runs(recipe, variant, profile),
        "fits_one_node": fits_one_node(recipe, variant, profile),
        "single_node_tp": _number(single_node_size(selection)[0]),
        "strategies": here,
        "recommended": best[0] if best else None,
        "recommended_nodes": best[1] if best else None,
        "default_features": list(default_features(recipe, variant, profile.id)),
    }
    modes = {
        name: effective_mode(recipe, name, variant, profile, None)
        for name, feature in (recipe.get("features") or {}).items()
        if feature and feature.get("modes")
    }
    if modes:
        found["modes"] = modes
    if PD in here:
        found["pd"] = {"site": _site(recipe, variant, profile), "api": _api(recipe, variant, profile)}
    return found


def _number(count: Count) -> int | None:
    return count if isinstance(count, int) else None


def _mode(recipe: Document, role: Role) -> str:
    offered = pool_modes(recipe)
    mode = recipe.get("strategy_overrides", PD, role, "parallelism") or "tp"
    return mode if mode in offered else offered[0]


def _site(recipe: Document, variant: str, profile: Profile) -> dict[str, Any]:
    return {
        role: {
            "nodes": pool_nodes(recipe, variant, profile, role, _mode(recipe, role)),
            "parallelism": _mode(recipe, role),
        }
        for role in ROLES
    }


def _api(recipe: Document, variant: str, profile: Profile) -> dict[str, Any] | str | None:
    """Return the pool sizes that the collection's published JSON has: None is co-located, "skip" not rendered."""
    if not profile.gpu_count or not profile.vram_gb:
        return "skip"
    weights = minimum_gb(recipe, variant) or 0
    floors = {role: floor_gpus(recipe, _mode(recipe, role), profile) for role in ROLES}
    if 2 * weights <= profile.vram_gb and 2 * max(floors.values()) <= profile.gpu_count:
        return None
    nodes: dict[str, Any] = {
        role: max(1, ceil(weights / profile.vram_gb), ceil(floor / profile.gpu_count)) for role, floor in floors.items()
    }
    return nodes if profile.scalable and max(nodes.values()) <= _MOST_API_NODES else "skip"
