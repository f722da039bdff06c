"""Parallel sizes and placement of a prefill or a decode pool (strategy pd_cluster). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster.recipes.choice import PD, Role, Selection
from pdcluster.recipes.documents import Document
from pdcluster.recipes.hardware import Count, at_least_one
from pdcluster.recipes.tokens import Origin, Unit, units_of
from pdcluster.recipes.topology import DP, DP_LOCAL, HYBRID_LB, SIZES, START_RANK, TP

EXPERT_PARALLEL = "--enable-expert-parallel"
MODES = ("tp", "tep", "dep")
_ENDINGS = {"_tp": "tp", "_tp_pp": "tp", "_tp_dp": "tp", "_tep": "tep", "_dep": "dep"}


def offered_modes(recipe: Document, strategies: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pool modes on offer: those of the offered strategies' layouts, narrowed by `pool_modes`."""
    found = {mode for name in strategies for ending, mode in _ENDINGS.items() if name.endswith(ending)} or {"tp"}
    narrowed = found & set(recipe.get("strategy_overrides", PD, "pool_modes") or ())
    return tuple(mode for mode in MODES if mode in (narrowed or found))


def configured_mode(selection: Selection, role: Role) -> str:
    """Return the mode that was picked, else the role's, else tp; it may not be on offer."""
    return selection.pool(role).parallelism or selection.override(role, "parallelism") or "tp"


def effective_mode(selection: Selection, role: Role, offered: tuple[str, ...]) -> str:
    """Return the mode that is used: the configured one where it is on offer, else the first that is."""
    mode = configured_mode(selection, role)
    return mode if mode in offered else offered[0]


def pool_gpus(selection: Selection, role: Role) -> Count:
    """Return how many GPUs one instance of a pool has; co-located roles have half a node each."""
    nodes, gpus = selection.pool(role).nodes, selection.profile.gpus
    return gpus * nodes if nodes else gpus // 2


def cut_rank(selection: Selection, role: Role) -> int:
    """Return the node that a command is for, cut to the nodes there are."""
    pool = selection.pool(role)
    return min(max(pool.rank, 0), max(1, pool.nodes) - 1)


def pool_units(selection: Selection, role: Role, mode: str, *, published: bool) -> list[Unit]:
    """Return a pool's parallel sizes for the node that is meant."""
    nodes, gpus = selection.pool(role).nodes, selection.profile.gpus
    share = f"{nodes} node{'s' if nodes > 1 else ''} of {gpus} GPUs" if nodes else f"half of {gpus} GPUs"
    origin = Origin(SIZES, note=f"{role} pool, {mode}: {share} ({selection.profile.id})")
    tokens = _dep(selection, role, published=published) if mode == "dep" else _tp(selection, role, mode)
    return units_of(tokens, origin)


def _tp(selection: Selection, role: Role, mode: str) -> Iterator[str]:
    nodes, rank = selection.pool(role).nodes, cut_rank(selection, role)
    yield str(selection.override(role, "parallel_flag") or TP)
    yield str(at_least_one(pool_gpus(selection, role)))
    if mode == "tep":
        yield EXPERT_PARALLEL
    if nodes > 1:
        yield from ("--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", first_node(role))
        if rank > 0:
            yield "--headless"


def _dep(selection: Selection, role: Role, *, published: bool) -> Iterator[str]:
    width = selection.override(role, "tp")
    if width:
        yield from (TP, str(width))
    nodes = max(1, selection.pool(role).nodes)
    local = local_ranks(selection, role, published=published)
    yield from (DP, str(local * nodes), DP_LOCAL, str(local))
    yield from (START_RANK, str(local * cut_rank(selection, role)))
    yield from ("--data-parallel-address", first_node(role))
    yield from ("--data-parallel-rpc-port", f"${role.upper()}_DP_RPC_PORT")
    if nodes > 1:
        yield HYBRID_LB
    yield EXPERT_PARALLEL


def local_ranks(selection: Selection, role: Role, *, published: bool) -> Count:
    """Return the data-parallel ranks of one node of a dep pool; as published, co-located pools both take the node."""
    gpus = selection.profile.gpus
    if not published and not selection.pool(role).nodes:
        gpus = gpus // 2
    return at_least_one(gpus // (selection.override(role, "tp") or 1))


def first_node(role: Role) -> str:
    """Return the recipe's variable for the address of a pool's first node."""
    return f"${role.upper()}_NODE_1"


def placement(selection: Selection, role: Role) -> dict[str, str]:
    """Return the environment that pins a pool to its GPUs and, over several nodes, to a network interface."""
    nodes, gpus = selection.pool(role).nodes, selection.profile.gpu_count
    half = gpus // 2
    devices = range(gpus) if nodes else range(half) if role == "prefill" else range(half, 2 * half)
    found = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
    if nodes > 1:
        found |= {"GLOO_SOCKET_IFNAME": "$IFACE_NAME", "NCCL_SOCKET_IFNAME": "$IFACE_NAME"}
    return found
