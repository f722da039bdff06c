"""What a recipe offers: hardware, strategies with their smallest node counts, defaults. Pure.

The rules are section 10 of the semantics; `MAX_NODES` is how far a floor may reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

from pdcluster.recipes.choice import PD, Role
from pdcluster.recipes.documents import Document
from pdcluster.recipes.hardware import NVIDIA, Profile, keyed
from pdcluster.recipes.pools import offered_modes

MAX_NODES = 16
_BLACKWELL_PRECISIONS = ("nvfp4", "fp4")
_BRANDS = (NVIDIA, "AMD")


def minimum_gb(recipe: Document, variant: str) -> float | None:
    """Return the declared minimum of GPU memory in GB, None where the recipe declares none."""
    found = recipe.get("variants", variant, "vram_minimum_gb")
    return found if isinstance(found, int | float) else None


def why_not_hardware(recipe: Document, variant: str, profile: Profile) -> str | None:
    """Return why a variant isn't offered on this hardware, None where it is."""
    rule = precision_rule(recipe, variant)
    precision = recipe.get("variants", variant, "precision")
    for key, wanted in rule.items():
        allowed = wanted if isinstance(wanted, list) else [wanted]
        have = {"brand": profile.brand, "generation": profile.generation}.get(key, profile.id)
        if have.lower() not in {str(item).lower() for item in allowed}:
            needs = " ".join(str(item) for item in allowed)
            return f"precision {precision} needs {key} {needs}, {profile.id} is {have}"
    if recipe.get("meta", "hardware", profile.id) == "unsupported":
        return f"the recipe declares {profile.id} unsupported"
    listed = recipe.get("variants", variant, "supported_hardware") or []
    if listed and profile.id not in listed:
        return f"variant {variant} supports {', '.join(listed)} only"
    if profile.restricted and recipe.get("meta", "hardware", profile.id) is None:
        return f"{profile.id} is offered only by recipes that name it"
    return None


def precision_rule(recipe: Document, variant: str) -> Mapping[str, Any]:
    """Return what the variant's precision asks of hardware; its own rule replaces the built-in one as a whole."""
    own = recipe.get("variants", variant, "precision_hardware")
    if own is not None:
        return own if isinstance(own, Mapping) else {}
    if recipe.get("variants", variant, "precision") in _BLACKWELL_PRECISIONS:
        return {"brand": NVIDIA, "generation": "blackwell"}
    return {}


def runs(recipe: Document, variant: str, profile: Profile) -> bool:
    """Tell whether hardware may be selected: it scales, or one node holds the declared minimum."""
    return profile.scalable or fits_one_node(recipe, variant, profile)


def fits_one_node(recipe: Document, variant: str, profile: Profile) -> bool:
    """Tell whether one node holds the declared minimum; where its memory is unknown, nothing says that it doesn't."""
    return not profile.vram_gb or (minimum_gb(recipe, variant) or 0) <= profile.vram_gb


def offered_strategies(recipe: Document) -> tuple[str, ...]:
    """Return the strategies that the recipe lists, then those it grants on some hardware."""
    listed = list(recipe.get("compatible_strategies") or ())
    for name, table in (recipe.get("strategy_hardware") or {}).items():
        if name not in listed and "supported" in (table or {}).values():
            listed.append(name)
    return tuple(listed)


def pool_modes(recipe: Document) -> tuple[str, ...]:
    """Return the parallelisms that a pool may have, in the order tp, tep, dep."""
    return offered_modes(recipe, offered_strategies(recipe))


def why_not_strategy(recipe: Document, strategy: str, profile: Profile) -> str | None:
    """Return why a strategy isn't offered on this hardware, None where it is."""
    found = keyed(recipe.get("strategy_hardware", strategy), profile)
    if found and found[1] == "unsupported":
        return f"the recipe declares {strategy} unsupported on {found[0]}"
    if found is None and strategy not in (recipe.get("compatible_strategies") or ()):
        granted = [
            key for key, value in (recipe.get("strategy_hardware", strategy) or {}).items() if value != "unsupported"
        ]
        return (
            f"the recipe offers {strategy} on {', '.join(granted)} only"
            if granted
            else (f"the recipe does not offer {strategy}")
        )
    if not profile.scalable and (is_multi_node(strategy) or strategy == PD):
        return f"{profile.id} cannot be joined with other nodes"
    floor = floor_gpus(recipe, strategy, profile)
    most = MAX_NODES if is_multi_node(strategy) or strategy == PD else 1
    if profile.gpu_count and floor > most * profile.gpu_count:
        has = f"one node of {profile.id} has {profile.gpu_count}"
        return f"{strategy} needs {floor} GPUs, {has}" + (f" and at most {most} are joined" if most > 1 else "")
    return None


def is_multi_node(strategy: str) -> bool:
    """Tell whether a strategy spreads one instance over nodes."""
    return strategy.startswith("multi_node")


def floor_gpus(recipe: Document, key: str, profile: Profile) -> int:
    """Return the fewest GPUs that a strategy or a pool mode (tp, tep, dep) needs; 0 where nothing is declared."""
    floor = recipe.get("strategy_min_gpus")
    if not isinstance(floor, Mapping):
        return floor if isinstance(floor, int) else 0
    exact = floor.get(profile.id)
    return max(_entry(floor, key), exact if isinstance(exact, int) else _entry(exact, key))


def _entry(table: Any, key: str) -> int:
    if isinstance(table, Mapping):
        for name in (key, f"multi_node_{key}", f"single_node_{key}"):
            if isinstance(table.get(name), int):
                return int(table[name])
    return 0


def smallest_nodes(recipe: Document, strategy: str, profile: Profile) -> int:
    """Return the fewest nodes that clear a strategy's floor; a multi-node one has two at least."""
    nodes = max(1, _nodes_for(floor_gpus(recipe, strategy, profile), profile.gpu_count))
    return max(2, nodes) if is_multi_node(strategy) else nodes


def _nodes_for(needed: float, of_node: float) -> int:
    """Return how many nodes give what is needed; 0, no demand, where it is unknown what a node has."""
    return ceil(needed / of_node) if of_node else 0


def strategies_on(recipe: Document, profile: Profile) -> dict[str, int]:
    """Return the strategies that are offered on this hardware, each with its smallest node count."""
    return {
        name: smallest_nodes(recipe, name, profile)
        for name in offered_strategies(recipe)
        if why_not_strategy(recipe, name, profile) is None
    }


def hardware_for(recipe: Document, variant: str, profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """Return the hardware that a variant may be shown with, in the taxonomy's order."""
    return tuple(profile for profile in profiles if why_not_hardware(recipe, variant, profile) is None)


def default_hardware(recipe: Document, variant: str, profiles: Iterable[Profile]) -> str | None:
    """Return the hardware that a variant starts with, None where there is none."""
    shown = {profile.id: profile for profile in hardware_for(recipe, variant, profiles)}
    usable = {name: item for name, item in shown.items() if runs(recipe, variant, item)} or shown
    blackwell = precision_rule(recipe, variant).get("generation") == "blackwell"
    wanted = [recipe.get("meta", "default_hardware"), *(("b200", "gb200") if blackwell else ()), "h200"]
    for name in wanted:
        if name in usable:
            return str(name)

    def rank(name: str) -> tuple[int, str]:
        brand = usable[name].brand
        return (_BRANDS.index(brand) if brand in _BRANDS else len(_BRANDS), name)

    return min(usable, key=rank, default=None)


def recommended(recipe: Document, variant: str, profile: Profile) -> tuple[str, int] | None:
    """Return the strategy and node count that a variant starts with on this hardware, None where none is offered."""
    here = strategies_on(recipe, profile)
    if not here:
        return None
    large = not fits_one_node(recipe, variant, profile)
    nodes = 2 if large and profile.scalable and any(is_multi_node(name) for name in here) else 1
    found = _preferred(recipe, nodes)
    if found not in here:
        found = next((name for name in here if name != PD), next(iter(here)))
    return found, max(2 if is_multi_node(found) else nodes, here[found])


def _preferred(recipe: Document, nodes: int) -> str | None:
    offered = offered_strategies(recipe)
    wanted = recipe.get("default_strategy")
    if wanted in offered:
        sibling = str(wanted).replace("single_node_", "multi_node_", 1)
        if nodes == 1 or not str(wanted).startswith("single_node_"):
            return str(wanted)
        if sibling in offered:
            return sibling
    if nodes > 1:
        for name in ("multi_node_tp", "multi_node_dep", "multi_node_tep"):
            if name in offered:
                return name
    return "single_node_tp" if "single_node_tp" in offered else next(iter(offered), None)


def pool_nodes(recipe: Document, variant: str, profile: Profile, role: Role, mode: str) -> int:
    """Return the nodes that an instance of a pool starts with: declared, or what the weights and the floor ask for."""
    declared = recipe.get("strategy_overrides", PD, role, "nodes")
    if isinstance(declared, Mapping):
        declared = declared.get(profile.id, declared.get("default"))
    nodes = declared if isinstance(declared, int) and declared > 0 else None
    if nodes is None:
        nodes = _nodes_for(minimum_gb(recipe, variant) or 0, profile.vram_gb)
    return max(1, nodes, _nodes_for(floor_gpus(recipe, mode, profile), profile.gpu_count))
