"""What a person asks for of a recipe, and the choice it becomes where they left something open. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdcluster.errors import UserError
from pdcluster.recipes.choice import PD, ROLES, Choice, PoolChoice, Role
from pdcluster.recipes.documents import Document
from pdcluster.recipes.features import default_features
from pdcluster.recipes.hardware import Profile
from pdcluster.recipes.names import unknown
from pdcluster.recipes.offers import (
    default_hardware,
    is_multi_node,
    pool_modes,
    pool_nodes,
    recommended,
    smallest_nodes,
)

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library


@dataclass(frozen=True, slots=True)
class Request:
    """A recipe's id and whatever else was said; None and empty are left to the recipe's defaults."""

    model: str
    variant: str | None = None
    hardware: str | None = None
    strategy: str | None = None
    nodes: int | None = None
    prefill_nodes: int | None = None
    decode_nodes: int | None = None
    prefill_parallelism: str | None = None
    decode_parallelism: str | None = None
    features: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    only_these: bool = False
    kv_offload: str | None = None
    kv_store: str | None = None
    gpus_per_node: int | None = None
    user_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """A full choice and what was taken because nobody said otherwise."""

    choice: Choice
    assumed: tuple[str, ...]


def complete(library: Library, request: Request) -> Completed:
    """Fill in defaults; raises `UserError` for unknown names."""
    recipe = library.recipe(request.model)
    assumed: list[str] = []

    def take(what: str, given: str | None, default: str | None) -> str:
        if given is not None:
            return given
        if default is None:
            raise UserError(f"{recipe.file}: no {what} is offered by default; name one with --{what}")
        assumed.append(f"{what} {default}")
        return default

    variant = take("variant", request.variant, "default")
    if variant not in (recipe.get("variants") or {}):
        raise UserError(f"{recipe.file}: {unknown('variant', variant, tuple(recipe.get('variants') or {}))}")
    hardware = take("hardware", request.hardware, default_hardware(recipe, variant, library.profiles().values()))
    profile = library.profile(hardware)
    best = recommended(recipe, variant, profile)
    strategy = take("strategy", request.strategy, best[0] if best else None)
    library.strategy(strategy)
    features, modes = _features(recipe, request, variant, hardware)
    nodes = 1
    pools: dict[str, PoolChoice] | None = None
    if strategy == PD:
        pools = {role: _pool(recipe, request, variant, profile, role, assumed) for role in ROLES}
        if request.nodes is not None:
            raise UserError(
                "--nodes: pd_cluster has --prefill-nodes and --decode-nodes, nodes of one instance of a pool"
            )
    else:
        default = max(smallest_nodes(recipe, strategy, profile), _for_weights(best, strategy))
        nodes = request.nodes if request.nodes is not None else default
        if request.nodes is None and nodes > 1:
            assumed.append(f"{nodes} nodes")
    choice = Choice(
        model=request.model,
        strategy=strategy,
        hardware=hardware,
        variant=variant,
        features=features,
        modes=modes,
        nodes=nodes,
        pools=pools,
        user_args=request.user_args,
        kv_offload=request.kv_offload,
        kv_store=request.kv_store,
        gpus_per_node=request.gpus_per_node,
        asked=frozenset(name.partition("=")[0] for name in request.features),
    )
    return Completed(choice, tuple(assumed))


def _for_weights(best: tuple[str, int] | None, strategy: str) -> int:
    """Return the nodes that the recipe recommends, where the strategy has several."""
    return best[1] if best is not None and is_multi_node(strategy) else 1


def _features(
    recipe: Document, request: Request, variant: str, hardware: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    known = recipe.get("features") or {}
    modes = {}
    asked = []
    for text in request.features:
        name, equals, mode = text.partition("=")
        if equals:
            modes[name] = mode
        asked.append(name)
    for name in (*asked, *request.without):
        if name not in known:
            raise UserError(f"{recipe.file}: {unknown('feature', name, tuple(known))}")
    start = () if request.only_these else default_features(recipe, variant, hardware)
    wanted = {*start, *asked} - set(request.without)
    return tuple(name for name in known if name in wanted), modes


def _pool(
    recipe: Document, request: Request, variant: str, profile: Profile, role: Role, assumed: list[str]
) -> PoolChoice:
    picked = request.prefill_parallelism if role == "prefill" else request.decode_parallelism
    offered = pool_modes(recipe)
    if picked is not None and picked not in offered:
        raise UserError(f"{recipe.file}: {unknown(f'{role} parallelism', picked, offered)}")
    mode = picked or recipe.get("strategy_overrides", PD, role, "parallelism") or "tp"
    mode = mode if mode in offered else offered[0]
    given = request.prefill_nodes if role == "prefill" else request.decode_nodes
    nodes = given if given is not None else pool_nodes(recipe, variant, profile, role, mode)
    if given is None:
        assumed.append(f"{nodes} node{'s' if nodes > 1 else ''} for each {role} instance")
    return PoolChoice(nodes, 0, picked)
