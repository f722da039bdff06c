"""What is refused before it is started: floors, node counts, sizes that don't fit, offers. Pure.

Rules in `PUBLISHED_FAULTS` name commands that the recipe project's own resolver publishes although they cannot work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pdcluster.recipes.choice import PD, ROLES, Finding, Role, Selection
from pdcluster.recipes.command import Command
from pdcluster.recipes.extras import extra_findings
from pdcluster.recipes.offers import floor_gpus, pool_modes
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
        yield from _below(selection, strategy, floor, nodes * selection.profile.gpu_count)
    yield from extra_findings(selection)


def _check_pool(selection: Selection, role: Role) -> Iterator[Finding]:
    pool, gpus = selection.pool(role), selection.profile.gpu_count
    offered = pool_modes(selection.recipe)
    mode, configured = effective_mode(selection, role, offered), configured_mode(selection, role)
    floor = floor_gpus(selection.recipe, mode, selection.profile)
    yield from _below(selection, f"the {role} pool ({mode})", floor, pool_gpus(selection, role))
    if not pool.nodes and gpus < 2:  # noqa: PLR2004 - one each
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


def _below(selection: Selection, who: str, floor: int, have: int) -> Iterator[Finding]:
    if have < floor:
        profile = selection.profile
        nodes = -(-floor // profile.gpu_count)
        what = f"{who} needs {floor} GPUs, here are {have}"
        fix = f"give {nodes} nodes of {profile.id}, or force it with --below-floor"
        yield Finding("below-floor", "refusal", what, fix)


def check_commands(selection: Selection, commands: Sequence[Command]) -> Iterator[Finding]:
    """Yield what finished commands ask for and cannot have: more GPUs than there are, ranks that don't divide."""
    for command in commands:
        sizes = read_sizes(command.units)
        spread = value_of(command.units, "--nnodes") is not None
        if command.role is None:
            have = selection.profile.gpu_count * (selection.choice.nodes if spread else 1)
        else:
            nodes = selection.pool(command.role).nodes
            have = pool_gpus(selection, command.role)
            have = have // max(1, nodes) if nodes and not spread else have
        needed = sizes.node_gpus
        if needed > max(1, have) or (spread and needed != have):
            yield _misfit(command, needed, have, spread=spread)
        if sizes.tensor % sizes.decode_context:
            unit = value_of(command.units, DCP)
            what = (
                f"{command.name}: decode context parallel size {sizes.decode_context} does not divide TP {sizes.tensor}"
            )
            fix = "leave decode_context_parallelism out, or choose hardware or a strategy with a TP that it divides"
            yield Finding("dcp-divides-tp", "refusal", what, fix, unit.origin if unit else None)


def _misfit(command: Command, needed: int, have: int, *, spread: bool) -> Finding:
    named = [unit for flag in (TP, PP, DP, DP_LOCAL) if (unit := value_of(command.units, flag)) is not None]
    culprit: Unit | None = next((unit for unit in named if unit.origin.layer != SIZES), named[0] if named else None)
    sizes = " x ".join(" ".join(unit.tokens) for unit in named)
    what = f"{command.name}: {sizes} takes {needed} GPUs, {'the nodes have' if spread else 'there are'} {have}"
    fix = "choose another strategy or hardware, or mend the size in that layer"
    return Finding("sizes-against-gpus", "refusal", what, fix, culprit.origin if culprit else None)
