"""A recipe in short, as plain data: what `recipe list` and `recipe show` print. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdcluster.recipes.documents import Document
from pdcluster.recipes.features import default_features
from pdcluster.recipes.offers import (
    default_hardware,
    floor_gpus,
    hardware_for,
    minimum_gb,
    offered_strategies,
    strategies_on,
)

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library


def summarise(library: Library, model: str) -> dict[str, Any]:
    """Return one line's worth: id, variants, strategies, oldest vLLM."""
    recipe = library.recipe(model)
    return {
        "model": model,
        "title": recipe.get("meta", "title"),
        "variants": list(recipe.get("variants") or {}),
        "strategies": list(offered_strategies(recipe)),
        "minimum_vllm": recipe.get("model", "min_vllm_version"),
    }


def describe(library: Library, model: str) -> dict[str, Any]:
    """Return what a recipe offers; figures in GB are the recipe's own declarations."""
    recipe = library.recipe(model)
    found = {
        **summarise(library, model),
        "context_length": recipe.get("model", "context_length"),
        "nightly_required": recipe.get("model", "nightly_required"),
        "variants": {name: _variant(library, recipe, name) for name in recipe.get("variants") or {}},
        "hardware_status": recipe.get("meta", "hardware") or {},
        "strategies_on": _strategies(library, recipe),
        "features": {name: _feature(recipe, name) for name in recipe.get("features") or {}},
        "default_features": list(default_features(recipe, "default", "")),
    }
    sources = recipe.get("sources")
    return {**found, "sources": sources, "facts": recipe.get("facts")} if sources else found


def _variant(library: Library, recipe: Document, name: str) -> dict[str, Any]:
    profiles = library.profiles().values()
    declared = recipe.get("variants", name)
    return {
        "model_id": declared.get("model_id") or recipe.get("model", "model_id"),
        "precision": declared.get("precision"),
        "declared_minimum_gb": minimum_gb(recipe, name),
        "minimum_vllm": declared.get("min_vllm_version") or recipe.get("model", "min_vllm_version"),
        "hardware": [profile.id for profile in hardware_for(recipe, name, profiles)],
        "default_hardware": default_hardware(recipe, name, profiles),
    }


def _strategies(library: Library, recipe: Document) -> dict[str, Any]:
    """Return, for each hardware that some variant may have, its strategies with their smallest node counts."""
    shown = {
        profile.id: profile
        for name in recipe.get("variants") or {}
        for profile in hardware_for(recipe, name, library.profiles().values())
    }
    return {
        name: [
            f"{strategy} ({nodes} node{'s' if nodes > 1 else ''}, floor {floor_gpus(recipe, strategy, profile) or 1})"
            for strategy, nodes in strategies_on(recipe, profile).items()
        ]
        for name, profile in shown.items()
    }


def _feature(recipe: Document, name: str) -> dict[str, Any]:
    feature = recipe.get("features", name) or {}
    found = {"description": feature.get("description"), "strategies": feature.get("strategies") or "all"}
    return {**found, "modes": list(feature["modes"])} if feature.get("modes") else found
