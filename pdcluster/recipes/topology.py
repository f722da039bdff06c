"""Parallel sizes that follow from GPUs and nodes, for every strategy but pd_cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdcluster.recipes.choice import Selection
from pdcluster.recipes.hardware import Count, block_key, keyed
from pdcluster.recipes.tokens import Origin, Unit, units_of, value_of

SIZES = "parallel sizes"
TP, DP, PP = "--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size"
DP_LOCAL, START_RANK = "--data-parallel-size-local", "--data-parallel-start-rank"
HYBRID_LB = "--data-parallel-hybrid-lb"


def node_names(selection: Selection) -> list[str]:
    """Return the names of a deployment's commands: one, or the head and its workers."""
    if selection.deploy_type != "multi_node" or selection.choice.nodes <= 1:
        return ["single"]
    return ["head", *(f"worker_{rank}" for rank in range(1, selection.choice.nodes))]


def layout(selection: Selection) -> str:
    """Return how a multi-node strategy lays ranks out: tp, tp_pp, tp_dp or dep."""
    named = selection.strategy.get("parallelism")
    if named in ("tp_pp", "tp_dp"):
        return str(named)
    return "dep" if selection.strategy.get("parallel_flag") == DP else "tp"


def size_units(selection: Selection, rank: int, *, published: bool) -> list[Unit]:
    """Return the parallel sizes of the node `rank`; `published` leaves out what repairs a layout that can't start."""
    gpus, nodes = selection.profile.gpus, selection.choice.nodes
    origin = Origin(SIZES, note=f"{gpus} GPUs a node, {nodes} node{'s' if nodes > 1 else ''} of {selection.profile.id}")
    if node_names(selection) == ["single"]:
        size, why = single_node_size(selection)
        flag = str(selection.strategy.get("parallel_flag") or TP)
        return units_of([flag, str(size)], why or origin)
    tokens = list(_multi_node(selection, rank))
    units = units_of(tokens, origin)
    if layout(selection) == "tp_dp" and not published:
        units.append(Unit(HYBRID_LB, (HYBRID_LB,), Origin("correction", note="every node balances its own ranks")))
    return units


def _multi_node(selection: Selection, rank: int) -> Iterator[str]:
    gpus, nodes = selection.profile.gpus, selection.choice.nodes
    kind = layout(selection)
    if kind in ("tp", "tp_pp"):
        yield from (TP, str(gpus * nodes if kind == "tp" else gpus))
        if kind == "tp_pp":
            yield from (PP, str(nodes))
        yield from ("--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", "$HEAD_IP")
        if rank > 0:
            yield "--headless"
        return
    local: Count = 1 if kind == "tp_dp" else gpus
    if kind == "tp_dp":
        yield from (TP, str(gpus))
    yield from (DP, str(local * nodes), DP_LOCAL, str(local), "--data-parallel-address", "$HEAD_IP")
    if rank > 0:
        step: Count = 1 if kind == "tp_dp" else _declared_local_size(selection) or gpus
        yield from (START_RANK, str(step * rank))


def _declared_local_size(selection: Selection) -> int | None:
    """Return the last local data-parallel size that the strategy's overrides declare."""
    blocks = selection.override("hardware_overrides")
    keys = (block_key(blocks, selection.profile), selection.profile.id)
    places: list[Any] = [selection.override("vllm_args"), selection.override("extra_args")]
    places += [selection.override("hardware_overrides", key, "extra_args") for key in keys if key]
    found = None
    for tokens in places:
        unit = value_of(units_of(map(str, tokens or ()), Origin(SIZES)), DP_LOCAL)
        if unit is not None and unit.value.isdigit():
            found = int(unit.value)
    return found


def single_node_size(selection: Selection) -> tuple[Count, Origin | None]:
    """Return the size on one node and where it was declared, None where it follows from the GPUs."""
    profile = selection.profile
    if selection.choice.strategy != "single_node_tp":
        return profile.gpus, None
    variant = ("variants", selection.choice.variant, "tp")
    override = ("strategy_overrides", "single_node_tp", "tp")
    for layer, path in (("variant", variant), ("strategy override", override)):
        value, key = selection.recipe.get(*path), None
        found = keyed(value, profile)
        if found:
            key, value = found
        if isinstance(value, int) and value > 0:
            uncut = profile.generation == "cpu" or not profile.gpu_count
            size = value if uncut else min(value, profile.gpu_count)
            return size, Origin(layer, selection.recipe, (*path, key) if key else path)
    minimum = selection.variant("vram_minimum_gb")
    path = ("variants", selection.choice.variant, "vram_minimum_gb")
    if minimum is not None and profile.gpu_count and minimum <= profile.vram_gb / profile.gpu_count:
        return 1, Origin(SIZES, selection.recipe, path, f"{minimum} GB fit one GPU of {profile.id}")
    return profile.gpus, None
