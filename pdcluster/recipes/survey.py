"""Every command that a library of recipes can give, each distinct one once. Pure.

For each variant, hardware and strategy on offer: no features, the default selection, all of them, each mode alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdcluster.recipes.choice import PD, ROLES, Choice, PoolChoice, select
from pdcluster.recipes.command import Command
from pdcluster.recipes.documents import Document, KeyPath
from pdcluster.recipes.features import default_features, possible_modes
from pdcluster.recipes.hardware import Profile
from pdcluster.recipes.offers import hardware_for, pool_modes, pool_nodes, strategies_on
from pdcluster.recipes.pools import configured_mode
from pdcluster.recipes.resolve import resolve
from pdcluster.recipes.scalars import as_text
from pdcluster.recipes.substitution import substitute
from pdcluster.recipes.tokens import Origin, Unit, keep_last, units_of

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library

# What stands in for a recipe's variables: addresses and ports only have to look like some.
STAND_INS = {
    "HEAD_IP": "10.0.0.1",
    "IFACE_NAME": "eth0",
    "IB_IF": "mlx5_0",
    "PREFILL_DP_RPC_PORT": "29550",
    "DECODE_DP_RPC_PORT": "29551",
    "GPUS_PER_NODE": "8",
    **{f"{role.upper()}_NODE_{node}": f"10.0.{role == 'decode':d}.{node}" for role in ROLES for node in range(1, 17)},
}


OMNI = "--omni"


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A distinct command: which choice gives it first, what is served, its units; `plugin` is what the recipe needs."""

    case: str
    model: str
    units: tuple[Unit, ...]
    minimum_vllm: str | None
    plugin: str | None = None

    @property
    def arguments(self) -> list[str]:
        """What a parser reads, without variables."""
        return [substitute(token, STAND_INS) for unit in self.units for token in unit.tokens]


def survey(library: Library, model: str) -> Iterator[Surveyed]:
    """Yield every distinct command of one recipe; one of vllm-omni is its base and its tasks."""
    recipe = library.recipe(model)
    seen: set[tuple[str, ...]] = set()
    for case, served, units, floor in _commands(library, recipe, model):
        found = Surveyed(case, served, units, floor, OMNI if recipe.get("omni") else None)
        key = (served, *found.arguments)
        if key not in seen:
            seen.add(key)
            yield found


_Found = tuple[str, str, tuple[Unit, ...], str | None]


def _commands(library: Library, recipe: Document, model: str) -> Iterator[_Found]:
    if recipe.get("omni"):
        yield from _omni(recipe, model)
    for choice in _choices(library, recipe, model):
        floor = recipe.get("variants", choice.variant, "min_vllm_version") or recipe.get("model", "min_vllm_version")
        for command in _distinct_nodes(resolve(select(library, choice)).commands):
            features = "+".join(choice.features) or "none"
            case = f"{model}|{choice.variant}|{choice.strategy}|{choice.hardware}|f={features}|{command.name}"
            yield case, command.model, command.units, floor


def _distinct_nodes(commands: tuple[Command, ...]) -> tuple[Command, ...]:
    """Return a deployment's head and one worker: the other nodes differ from them in rank alone."""
    return commands[:2]


def _choices(library: Library, recipe: Document, model: str) -> Iterator[Choice]:
    profiles = library.profiles()
    for variant in recipe.get("variants") or {}:
        for profile in hardware_for(recipe, variant, profiles.values()):
            selections = list(_selections(recipe, variant, profile))
            for strategy, nodes in strategies_on(recipe, profile).items():
                for features, modes in selections:
                    base = Choice(model, strategy, profile.id, variant, features, modes, nodes)
                    if strategy == PD:
                        yield from _pooled(recipe, variant, profile, base, library)
                    else:
                        yield base


def _pooled(recipe: Document, variant: str, profile: Profile, base: Choice, library: Library) -> Iterator[Choice]:
    selection = select(library, base)
    modes = {role: configured_mode(selection, role) for role in ROLES}
    offered = pool_modes(recipe)
    nodes = {
        role: pool_nodes(recipe, variant, profile, role, mode if mode in offered else offered[0])
        for role, mode in modes.items()
    }
    for rank in (0, 1):
        yield replace(
            base, nodes=1, pools={role: PoolChoice(nodes[role], min(rank, nodes[role] - 1)) for role in ROLES}
        )


def _selections(recipe: Document, variant: str, profile: Profile) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    known = tuple(recipe.get("features") or {})
    yield (), {}
    yield default_features(recipe, variant, profile.id), {}
    yield known, {}
    for name in known:
        for mode in possible_modes(recipe, name, variant, profile):
            yield (name,), {name: mode}


def _omni(recipe: Document, model: str) -> Iterator[_Found]:
    floor = recipe.get("model", "min_vllm_version")
    base: list[Unit] = []
    for path in (("model", "base_args"), ("variants", "default", "extra_args")):
        base += _units(recipe, path, "omni base")
    flag = units_of([OMNI], Origin("omni", recipe, ("omni",)))
    tasks = recipe.get("omni", "tasks") or []
    for index, task in enumerate(tasks):
        known = task if isinstance(task, dict) else {}
        place: KeyPath = ("omni", "tasks", index, "extra_args")
        extra = units_of([as_text(item) for item in known.get("extra_args") or ()], Origin("omni task", recipe, place))
        served = known.get("model_id") or recipe.get("model", "model_id") or model
        yield f"{model}|omni|task {index}", served, keep_last([*base, *extra, *flag]), floor


def _units(recipe: Document, path: KeyPath, layer: str) -> list[Unit]:
    return units_of([as_text(item) for item in recipe.get(*path) or ()], Origin(layer, recipe, path))
