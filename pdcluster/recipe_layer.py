"""A recipe as the lowest layer of a cluster spec: what its two pools set, each key with its origin.

What belongs to a node (rank, address, ports) and to the connector is left to the plan, which knows real hosts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster.errors import PlanError, Problem, SpecError, UserError
from pdcluster.flags import OWNED_ENVIRONMENT, POOL_FLAGS, SIZE_FLAGS
from pdcluster.inventory import Device, Inventory, Kind
from pdcluster.recipes.choice import PD, ROLES
from pdcluster.recipes.command import Command
from pdcluster.recipes.deployment import Deployment, deploy
from pdcluster.recipes.hardware import Profile, Unknown
from pdcluster.recipes.library import SHIPPED, Library
from pdcluster.recipes.request import Request, complete
from pdcluster.recipes.substitution import substitute, variables_in
from pdcluster.recipes.tokens import Unit
from pdcluster.spec import RecipeSpec

# The plan writes these for each node, from the pool's sizes and its hosts.
NODE_FLAGS = (
    "--host",
    "--port",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--headless",
    "--data-parallel-size-local",
    "--data-parallel-start-rank",
    "--data-parallel-address",
    "--data-parallel-rpc-port",
    "--data-parallel-hybrid-lb",
)
_FIELDS: Mapping[str, str] = {flag: field for table in (POOL_FLAGS, SIZE_FLAGS) for field, flag in table.items()}
_SWITCHES: Mapping[str, tuple[str, bool]] = {
    "--enable-expert-parallel": ("enable_expert_parallel", True),
    "--no-enable-expert-parallel": ("enable_expert_parallel", False),
    "--enforce-eager": ("enforce_eager", True),
    "--no-enforce-eager": ("enforce_eager", False),
}
_SPECULATIVE = "--speculative-config"
_TRANSFER = "--kv-transfer-config"


class UnknownCountError(UserError):
    """No source says how many devices a node of the hardware has, so that sizes are variables yet."""


@dataclass(frozen=True, slots=True)
class RecipeLayer:
    """The spec's keys that the recipe sets, the origin of each, the resolved recipe, and what it left open."""

    document: dict[str, Any]
    origins: Mapping[str, str]
    deployment: Deployment
    assumed: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """The recipe's variables that nobody has given a value."""
        found = [
            name
            for pool in self.document["pools"].values()
            for value in (*pool["env"].values(), *pool["extra_args"])
            for name in variables_in(value)
        ]
        return tuple(dict.fromkeys(found))


def open_recipes(recipe: RecipeSpec) -> Library:
    """Return the directory of recipes that the spec names, or the shipped one."""
    return Library(recipe.directory or SHIPPED)


def request_of(recipe: RecipeSpec, nodes: Mapping[str, Any], strategy: str | None = PD) -> Request:
    """Return what the spec's recipe section asks for; `nodes` are those that the pools set themselves."""
    shared = 0 if recipe.colocated else None
    pd = strategy == PD
    return Request(
        recipe.id,
        variant=recipe.variant,
        hardware=recipe.hardware,
        strategy=strategy,
        prefill_nodes=nodes.get("prefill", shared) if pd else None,
        decode_nodes=nodes.get("decode", shared) if pd else None,
        prefill_parallelism=recipe.prefill_parallelism,
        decode_parallelism=recipe.decode_parallelism,
        features=recipe.features,
        without=recipe.without,
        gpus_per_node=recipe.gpus_per_node,
    )


def recipe_layer(recipe: RecipeSpec, nodes: Mapping[str, Any]) -> RecipeLayer:
    """Resolve the recipe for the two pools; raises `UserError` with every refusal."""
    completed = complete(open_recipes(recipe), request_of(recipe, nodes))
    deployment = deploy(open_recipes(recipe), completed.choice)
    deployment.refuse(below_floor=recipe.below_floor, any_strategy=recipe.any_strategy)
    if isinstance(deployment.selection.profile.gpus, Unknown):
        hardware = deployment.selection.profile.id
        raise UnknownCountError(
            f"hardware {hardware}: no source says how many devices a node has; give --gpus-per-node"
        )
    document: dict[str, Any] = {"model": deployment.commands[0].model, "pools": {}}
    origins = {"model": f"recipe {recipe.id}: variant {completed.choice.variant}"}
    for role in ROLES:
        command = next(command for command in deployment.commands if command.role == role)
        chosen = (completed.choice.pools or {})[role].nodes
        pool, own = _pool(command, recipe.variables)
        document["pools"][role] = {**pool, "nodes": max(1, chosen)}
        origins |= {f"pools.{role}.{path}": origin for path, origin in own.items()}
        origins[f"pools.{role}.nodes"] = f"recipe {recipe.id}: {completed.choice.hardware}"
    return RecipeLayer(document, origins, deployment, completed.assumed)


def _pool(command: Command, variables: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a pool's keys and the origin of each, the extra arguments' by flag and the environment's by name."""
    pool: dict[str, Any] = {"extra_args": [], "env": {}}
    origins: dict[str, str] = {}
    for unit in command.units:
        flag = unit.flag or ""
        if flag in NODE_FLAGS:
            continue
        if flag == _TRANSFER:
            _refuse_other_connectors(unit)
            continue
        for path, value in _setting(unit):
            if path == "extra_args":
                pool["extra_args"] += [substitute(token, variables) for token in value]
                origins[f"extra_args.{flag}"] = str(unit.origin)
            else:
                pool[path] = {**pool[path], **value} if isinstance(pool.get(path), dict) else value
                origins[path] = str(unit.origin)
    for setting in command.environment:
        if setting.value is not None and setting.name not in OWNED_ENVIRONMENT:
            pool["env"][setting.name] = substitute(setting.value, variables)
            origins[f"env.{setting.name}"] = str(setting.origin)
    return pool, origins


def _setting(unit: Unit) -> Iterator[tuple[str, Any]]:
    """Yield (key of the pool, value) of one unit; what no key stands for is an extra argument."""
    flag = unit.flag or ""
    if flag in _FIELDS:
        yield _FIELDS[flag], unit.value
    elif flag in _SWITCHES:
        yield _SWITCHES[flag]
    elif flag == _SPECULATIVE:
        yield "speculative", _parse_json(unit)
    elif flag.startswith(f"{_SPECULATIVE}."):
        yield "speculative", {flag.partition(".")[2].replace("-", "_"): unit.value}
    else:
        yield "extra_args", unit.tokens


def _parse_json(unit: Unit) -> dict[str, Any]:
    try:
        found = json.loads(unit.value)
    except ValueError as error:
        raise SpecError([Problem(str(unit.origin), f"{unit.flag} is not JSON: {error}", "mend the recipe")]) from error
    if not isinstance(found, dict):
        raise SpecError([Problem(str(unit.origin), f"{unit.flag} must be a JSON object", "mend the recipe")])
    return found


def _refuse_other_connectors(unit: Unit) -> None:
    """Refuse a connector that the plan doesn't write itself: it must not be dropped silently."""
    name = _parse_json(unit).get("kv_connector")
    if name != "NixlConnector":
        what = f"the recipe moves KV with {name}, pdcluster launches NixlConnector"
        raise SpecError([Problem(str(unit.origin), what, "leave the KV store out, or run `pdcluster recipe resolve`")])


def recipe_notes(layer: RecipeLayer) -> list[str]:
    """Return what a person should know of the recipe that a plan was made of."""
    selection = layer.deployment.selection
    choice, gigabytes = selection.choice, selection.variant("vram_minimum_gb")
    notes = [
        f"recipe {choice.model}, variant {choice.variant}, on {choice.hardware}; features {', '.join(choice.features)}"
    ]
    if layer.assumed:
        notes.append(f"taken by default: {', '.join(layer.assumed)}")
    if gigabytes is not None:
        notes.append(f"the recipe declares a minimum of {gigabytes} GB for the weights of one instance")
    notes += [f"{finding.kind}: {finding}" for finding in layer.deployment.findings if finding.kind != "refusal"]
    if layer.variables:
        names = ", ".join(f"${name}" for name in layer.variables)
        notes.append(f"not known yet: {names}; give each with --set recipe.variables.NAME=VALUE before starting")
    return notes


def declared_inventory(profile: Profile) -> Inventory:
    """Return one host of a hardware profile; raises `PlanError` for kinds that pdcluster has no backend for."""
    kinds: dict[str, Kind] = {"NVIDIA": "cuda", "AMD": "rocm", "Huawei": "ascend"}
    kind: Kind | None = "cpu" if profile.generation == "cpu" else kinds.get(profile.brand)
    if kind is None:
        raise PlanError(
            f"hardware {profile.id}: pdcluster plans for CUDA, ROCm, Ascend and CPU hosts, not {profile.generation}"
        )
    each = int(profile.vram_gb * 10**9 / profile.gpu_count) if profile.gpu_count and profile.vram_gb else None
    devices = tuple(Device(index, profile.display_name, each) for index in range(profile.gpu_count))
    return Inventory(kind, () if kind == "cpu" else devices, hardware=profile.id)


def merge_under(layer: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Put a layer under a document: the document's values win, extra arguments follow the layer's."""
    merged = dict(layer)
    for key, value in document.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = merge_under(below, value)
        elif key == "extra_args" and isinstance(below, list) and isinstance(value, Sequence):
            merged[key] = [*below, *value]
        else:
            merged[key] = value
    return merged
