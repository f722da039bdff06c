"""The order of layers: which lists of arguments and which maps of environment apply, earliest first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdcluster.recipes.choice import PD, Role, Selection
from pdcluster.recipes.documents import Document, KeyPath
from pdcluster.recipes.hardware import block_key


@dataclass(frozen=True, slots=True)
class Layer:
    """One list of arguments or one map of environment: the layer's name, its file and its key path."""

    name: str
    document: Document
    path: KeyPath

    @property
    def value(self) -> Any:
        """What stands there, None where nothing does."""
        return self.document.get(*self.path)


def arguments_before_sizes(selection: Selection, role: Role | None) -> Iterator[Layer]:
    """Yield the layers that the parallel sizes override: base, variant, strategy."""
    recipe, variant = selection.recipe, ("variants", selection.choice.variant)
    yield Layer("base", recipe, ("model", "base_args"))
    yield Layer("variant", recipe, (*variant, "extra_args"))
    exact = (*variant, "hardware_overrides", selection.profile.id, "extra_args")
    yield Layer("variant on this hardware", recipe, exact)
    yield Layer("strategy", selection.strategy, (role, "vllm_args") if role else ("vllm_args",))


def arguments_after_sizes(selection: Selection, role: Role | None) -> Iterator[Layer]:
    """Yield the layers that override the parallel sizes: strategy override, hardware."""
    recipe, own = selection.recipe, _own(selection, role)
    yield Layer("strategy override", recipe, (*own, "extra_args"))
    yield Layer("strategy override", recipe, (*own, "vllm_args"))
    yield from _hardware(selection, role, "extra_args")


def environment(selection: Selection, role: Role | None) -> Iterator[Layer | None]:
    """Yield the layers of environment; None marks where the placement of a pool stands."""
    recipe, variant = selection.recipe, ("variants", selection.choice.variant)
    strategy = ("strategy_overrides", selection.choice.strategy)
    yield Layer("base", recipe, ("model", "base_env"))
    yield Layer("variant", recipe, (*variant, "extra_env"))
    exact = (*variant, "hardware_overrides", selection.profile.id, "extra_env")
    yield Layer("variant on this hardware", recipe, exact)
    yield Layer("strategy", selection.strategy, (role, "env") if role else ("env",))
    yield None
    yield Layer("strategy override", recipe, (*strategy, "env"))
    last = (*strategy, role, "env") if role else (*strategy, "extra_env")
    yield Layer("strategy override", recipe, last)
    yield from _hardware(selection, role, "extra_env")


def replacing_block(selection: Selection) -> KeyPath | None:
    """Return the path of the strategy's block for this generation: it replaces the recipe's and the variant's."""
    key = block_key(selection.override("hardware_overrides"), selection.profile)
    return ("strategy_overrides", selection.choice.strategy, "hardware_overrides", key) if key else None


def generation_blocks(selection: Selection) -> Iterator[KeyPath]:
    """Yield the blocks of the recipe and of the variant for this generation."""
    for path in (("hardware_overrides",), ("variants", selection.choice.variant, "hardware_overrides")):
        key = block_key(selection.recipe.get(*path), selection.profile)
        if key:
            yield (*path, key)


def _own(selection: Selection, role: Role | None) -> KeyPath:
    return ("strategy_overrides", PD, role) if role else ("strategy_overrides", selection.choice.strategy)


def _hardware(selection: Selection, role: Role | None, kind: str) -> Iterator[Layer]:
    recipe, exact = selection.recipe, selection.profile.id
    replacing = replacing_block(selection)
    if replacing:
        yield Layer("hardware (strategy's, replacing)", recipe, (*replacing, kind))
    else:
        for path in generation_blocks(selection):
            yield Layer("hardware", recipe, (*path, kind))
    strategy = ("strategy_overrides", selection.choice.strategy)
    yield Layer("strategy on this hardware", recipe, (*strategy, "hardware_overrides", exact, kind))
    if role:
        own = (*strategy, role, "hardware_overrides", exact, kind)
        yield Layer("pool on this hardware", recipe, own)
