"""What is refused before it is started: floors, node counts, sizes that don't fit, offers. Pure.

Rules in `PUBLISHED_FAULTS` name commands that the recipe project's own resolver publishes although they cannot work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pdcluster.recipes.choice import PD, ROLES, Finding, Role, Selection
from pdcluster.recipes.command import Command
from pdcluster.recipes.extras import extra_findings
from pdcluster.recipes.hardware import Count, Unknown
from pdcluster.recipes.offers import (
    floor_gpus,
    hardware_for,
    is_multi_node,
    pool_modes,
    strategies_on,
    why_not_hardware,
    why_not_strategy,
)
from pdcluster.recipes.pools import configured_mode, effective_mode, local_ranks, pool_gpus
from pdcluster.recipes.sizes import DCP, read_sizes
from pdcluster.recipes.tokens import Unit, value_of
from pdcluster.recipes.topology import DP, DP_LOCAL, PP, SIZES, TP

# Rule -> why the published command cannot work. These may deviate from the golden cases, nothing else may.
PUBLISHED_FAULTS: Mapping[str, str] = {
    "co-located-dep": "both pools of a node take all its GPUs as data-parallel ranks, though each sees half of them",
    "co-located-one-gpu": "prefill and decode would share the one GPU of the node",
    "side-channel-host": "the side channel's host follows a parallelism or a rank that the pool does not have",
    "tp-dp-hybrid-lb": "head and followers disagree on who balances load, and vLLM refuses the handshake",
    "sizes-against-gpus": "a layer fixes a parallel size that the GPUs of the deployment cannot carry",
    "local-size": "the total and the start rank do not follow the local data-parallel size",
    "below-floor": "fewer GPUs than the recipe's own floor",
    "mode-not-possible": "the mode asked for is excluded by variant or hardware, and another was taken silently",
    "nodes": "the node count does not go with the strategy",
    "split-token": "a flag and its value are one token, which vLLM reads as the model",
    "text-only-with-encoder": "text_only and encoder_parallel exclude each other",
}


def check_selection(selection: Selection) -> Iterator[Finding]:
    """Yield what can be told before resolving: node counts, floors, co-location, side channel."""
    nodes, strategy = selection.choice.nodes, selection.choice.strategy
    if selection.deploy_type == "multi_node" and nodes < 2:  # noqa: PLR2004 - several
        yield Finding(
            "nodes", "refusal", f"{strategy} at {nodes} node", "give 2 nodes or more, or a single_node strategy"
        )
    if selection.deploy_type == "single_node" and nodes > 1:
        yield Finding("nodes", "refusal", f"{strategy} at {nodes} nodes", "give 1 node, or a multi_node strategy")
    if strategy == PD:
        for role in ROLES:
            yield from _check_pool(selection, role)
    else:
        floor = floor_gpus(selection.recipe, strategy, selection.profile)
        yield from _below(selection, strategy, floor, selection.profile.gpus * nodes)
    yield from check_offer(selection)
    yield from extra_findings(selection)


def _check_pool(selection: Selection, role: Role) -> Iterator[Finding]:
    pool, gpus = selection.pool(role), selection.profile.gpus
    offered = pool_modes(selection.recipe)
    mode, configured = effective_mode(selection, role, offered), configured_mode(selection, role)
    floor = floor_gpus(selection.recipe, mode, selection.profile)
    yield from _below(selection, f"the {role} pool ({mode})", floor, pool_gpus(selection, role))
    if not pool.nodes and gpus == 1:
        what = f"{role} and the other pool would share the one GPU of a {selection.profile.id} node"
        yield Finding("co-located-one-gpu", "refusal", what, "give each pool a node of its own")
    elif not pool.nodes and mode == "dep":
        local, taken = (local_ranks(selection, role, published=published) for published in (False, True))
        if local != taken:
            what = (
                f"{role}: {local} data-parallel ranks in place of {taken}, since the pools share the node's {gpus} GPUs"
            )
            yield Finding("co-located-dep", "correction", what)
    if mode != configured:
        what = f"{role}: parallelism {configured} is not on offer, {mode} is taken; offered: {', '.join(offered)}"
        uses_host = pool.rank > 0 and "dep" in (mode, configured)
        yield Finding("side-channel-host", "correction" if uses_host else "warning", what)
    elif pool.rank >= max(1, pool.nodes):
        what = f"{role}: there is no node {pool.rank + 1} of {max(1, pool.nodes)}; the last is meant"
        yield Finding("side-channel-host", "correction", what)


def _below(selection: Selection, who: str, floor: int, have: Count) -> Iterator[Finding]:
    profile = selection.profile
    if isinstance(have, Unknown):
        if floor:
            what = f"{who} needs {floor} GPUs; no source says how many a node of {profile.id} has"
            yield Finding("floor-unknown", "warning", what, "give --gpus-per-node to have it checked")
    elif have < floor:
        nodes = -(-floor // profile.gpu_count)
        spread = [name for name in strategies_on(selection.recipe, profile) if is_multi_node(name)]
        fix = f"give {nodes} nodes of {profile.id}"
        if selection.deploy_type == "single_node":
            fix = f"{fix} with {' or '.join(spread)}" if spread else "choose hardware with more GPUs a node"
        yield Finding("below-floor", "refusal", f"{who} needs {floor} GPUs, here are {have}", fix)


def check_offer(selection: Selection) -> Iterator[Finding]:
    """Yield why the recipe doesn't offer this variant on this hardware, or this strategy there."""
    recipe, variant, profile = selection.recipe, selection.choice.variant, selection.profile
    reason = why_not_hardware(recipe, variant, profile)
    if reason is not None:
        others = [item.id for item in hardware_for(recipe, variant, selection.profiles)]
        variants = [name for name in recipe.get("variants") or {} if why_not_hardware(recipe, name, profile) is None]
        ways = [f"{variant} on {', '.join(others)}"] if others else []
        ways += [f"variant {' or '.join(variants)} on {profile.id}"] if variants else []
        yield Finding("hardware-not-offered", "refusal", reason, "choose " + ", or ".join(ways) if ways else "")
        return
    strategy = selection.choice.strategy
    reason = why_not_strategy(recipe, strategy, profile)
    if reason is not None:
        here = strategies_on(recipe, profile)
        fix = f"choose {', '.join(here)}" if here else "no strategy is offered there"
        fix += "; `plan` and `launch` make pools all the same with --any-strategy" if strategy == PD else ""
        yield Finding("strategy-not-offered", "refusal", reason, fix)


def check_commands(selection: Selection, commands: Sequence[Command]) -> Iterator[Finding]:
    """Yield what finished commands ask for and cannot have: more GPUs than there are, ranks that don't divide."""
    for command in commands:
        sizes = read_sizes(command.units)
        spread = value_of(command.units, "--nnodes") is not None
        have = _gpus_of(selection, command, spread=spread)
        if sizes is None or isinstance(have, Unknown):
            continue
        needed = sizes.node_gpus
        if needed > max(1, have) or (spread and needed != have):
            yield _misfit(command, needed, have, spread=spread)
        if sizes.tensor % sizes.decode_context:
            unit = value_of(command.units, DCP)
            what = f"{command.name}: {DCP} {sizes.decode_context} does not divide TP {sizes.tensor}"
            fix = f"leave decode_context_parallelism out, or use a size that divides {sizes.tensor}"
            yield Finding("dcp-divides-tp", "refusal", what, fix, unit.origin if unit else None)


def _gpus_of(selection: Selection, command: Command, *, spread: bool) -> Count:
    """Return the GPUs that one command's ranks may take: the node's, or all nodes' where ranks are spread."""
    if command.role is None:
        return selection.profile.gpus * (selection.choice.nodes if spread else 1)
    nodes, have = selection.pool(command.role).nodes, pool_gpus(selection, command.role)
    return have if spread or not nodes else have // nodes


def _misfit(command: Command, needed: int, have: int, *, spread: bool) -> Finding:
    named = [unit for flag in (TP, PP, DP, DP_LOCAL) if (unit := value_of(command.units, flag)) is not None]
    culprit: Unit | None = next((unit for unit in named if unit.origin.layer != SIZES), named[0] if named else None)
    sizes = " x ".join(" ".join(unit.tokens) for unit in named)
    what = f"{command.name}: {sizes} takes {needed} GPUs, {'the nodes have' if spread else 'there are'} {have}"
    fix = "choose another strategy or hardware, or mend the size in that layer"
    return Finding("sizes-against-gpus", "refusal", what, fix, culprit.origin if culprit else None)
