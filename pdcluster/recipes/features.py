"""A recipe's features: which are on by default, which mode is taken, and what they add. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdcluster.recipes.choice import Finding, Selection
from pdcluster.recipes.documents import Document, KeyPath
from pdcluster.recipes.hardware import Profile, block_key, keyed


@dataclass(frozen=True, slots=True)
class Addition:
    """What one feature adds: the key path of its arguments, None where it adds nothing, and why not."""

    feature: str
    path: KeyPath | None
    why_not: str = ""


def default_features(recipe: Document, variant: str, hardware: str) -> tuple[str, ...]:
    """Return the features that are on by default, in file order."""
    off = set(recipe.get("opt_in_features") or ()) | set(recipe.get("hardware_opt_in_features", hardware) or ())
    always = recipe.get("variants", variant, "default_modes") or {}
    return tuple(name for name in recipe.get("features") or {} if name not in off or name in always)


def additions(selection: Selection) -> Iterator[Addition]:
    """Yield what each enabled feature adds, in the order given."""
    for name in selection.choice.features:
        feature = selection.recipe.get("features", name)
        if feature is None:
            yield Addition(name, None, "the recipe has no such feature")
            continue
        strategies = feature.get("strategies") or ()
        if strategies and selection.choice.strategy not in strategies:
            yield Addition(name, None, f"it works with {', '.join(strategies)} only")
        elif feature.get("modes"):
            yield _with_modes(selection, name)
        else:
            key = block_key(feature.get("hardware_overrides"), selection.profile)
            path: KeyPath = ("features", name, "args")
            if key and selection.recipe.get("features", name, "hardware_overrides", key, "args") is not None:
                path = ("features", name, "hardware_overrides", key, "args")
            yield Addition(name, path)


def possible_modes(recipe: Document, feature: str, variant: str, profile: Profile) -> tuple[str, ...]:
    """Return the modes of a feature that this variant and hardware allow, in file order."""
    kept = []
    for name, mode in (recipe.get("features", feature, "modes") or {}).items():
        mode = mode or {}  # noqa: PLW2901 - an empty mode is written as a bare key
        variants, table = mode.get("variants") or (), mode.get("hardware") or {}
        excluded = "unsupported" in (table.get(profile.generation), table.get(profile.id))
        if (not variants or variant in variants) and not excluded:
            kept.append(name)
    return tuple(kept)


def effective_mode(recipe: Document, feature: str, variant: str, profile: Profile, pick: str | None) -> str | None:
    """Return the mode that is taken: the pick, the variant's default, the feature's, the first; None is possible."""
    kept = possible_modes(recipe, feature, variant, profile)
    wanted = (
        pick,
        recipe.get("variants", variant, "default_modes", feature),
        recipe.get("features", feature, "default_mode"),
        *kept,
    )
    return next((mode for mode in wanted if mode in kept), None)


def _with_modes(selection: Selection, name: str) -> Addition:
    choice, profile = selection.choice, selection.profile
    mode = effective_mode(selection.recipe, name, choice.variant, profile, choice.modes.get(name))
    if mode is None:
        return Addition(name, None, f"none of its modes works with variant {choice.variant} on {profile.id}")
    path: KeyPath = ("features", name, "modes", mode)
    found = keyed(selection.recipe.get(*path, "hardware_overrides"), profile)
    if found and isinstance(found[1], dict) and found[1].get("args") is not None:
        return Addition(name, (*path, "hardware_overrides", found[0], "args"))
    return Addition(name, (*path, "args"))


def feature_findings(selection: Selection) -> Iterator[Finding]:
    """Yield what is wrong with the features: nothing added, a pick that can't be, two that exclude each other."""
    choice, recipe = selection.choice, selection.recipe
    for addition in additions(selection):
        if addition.path is None:
            asked = addition.feature in choice.asked
            yield Finding(
                "feature-adds-nothing" if not asked else "feature-not-possible",
                "refusal" if asked else "warning",
                f"feature {addition.feature} adds nothing with {choice.strategy}: {addition.why_not}",
                "leave the feature out, or choose another strategy or variant" if asked else "",
            )
    for name, mode in choice.modes.items():
        kept = possible_modes(recipe, name, choice.variant, selection.profile)
        if mode not in kept:
            instead = f"choose {' or '.join(kept)}" if kept else f"leave {name} out"
            what = f"feature {name}: mode {mode} does not work with variant {choice.variant} on {choice.hardware}"
            yield Finding("mode-not-possible", "refusal", what, instead)
    if {"text_only", "encoder_parallel"} <= set(choice.features):
        what = "text_only leaves the vision encoder out, encoder_parallel spreads it"
        yield Finding("text-only-with-encoder", "refusal", what, "choose one of the two")
