"""From a spec to a plan that can start here: find the model, look at the host, check what can be checked.

Everything a user may have got wrong is found here, before anything runs.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdcluster.argv_check import check_arguments, vllm_version
from pdcluster.endpoint_files import find_endpoint_problems
from pdcluster.engine_args import ENGINE_KEY_VARIABLE
from pdcluster.engine_key import refuse_unusable_key
from pdcluster.errors import PlanError, Problem, SpecError, UserError
from pdcluster.flag_facts import is_older
from pdcluster.inventory import Inventory, take_inventory
from pdcluster.memory import fit_to_memory
from pdcluster.model_facts import Checkpoint, locate, read_facts
from pdcluster.models.catalog import CATALOG, default_cache, model_directory, prepare
from pdcluster.plan import Plan, make_plan
from pdcluster.recipe_layer import declared_inventory
from pdcluster.recipes.deployment import minimum_vllm
from pdcluster.spec_loading import Flag, LoadedSpec, with_flags

_PROXY_CHECK_S = 60.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan together with the spec it was made of (after --fit-memory) and the host it was made for."""

    loaded: LoadedSpec
    plan: Plan
    inventory: Inventory


def prepare_plan(
    loaded: LoadedSpec,
    environment: Mapping[str, str],
    say: Say,
    *,
    build: bool,
    fit_memory: bool = False,
    declared: bool = False,
) -> Prepared:
    """Make the plan for this host. With `build` an embedded model that isn't there yet is made (takes a minute).

    With `declared` a recipe's plan is made for the hardware that it names, wherever we are.
    """
    refuse_unusable_key(environment)
    refuse_other_strategies(loaded)
    checkpoint = find_checkpoint(loaded.spec.model, say, build=build)
    if declared and loaded.recipe is not None:
        inventory = declared_inventory(loaded.recipe.deployment.selection.profile)
    else:
        inventory = take_inventory(environment)
    if fit_memory and checkpoint.facts is not None:
        loaded = _fit(loaded, inventory, checkpoint, say)
    keyed = bool(environment.get(ENGINE_KEY_VARIABLE))
    return Prepared(loaded, make_plan(loaded, inventory, checkpoint, sys.executable, keyed=keyed), inventory)


def find_checkpoint(model: str, say: Say, *, build: bool) -> Checkpoint:
    """Return where the model's checkpoint is and what it says; raises `UserError` for an unknown model."""
    directory = locate(model, CATALOG)
    if model in CATALOG:
        directory = prepare(model, progress=say) if build else model_directory(model)
        if not directory.is_dir():
            return Checkpoint(str(directory), local=True, facts=None)
    if directory is None:
        return Checkpoint(model, local=False, facts=None)
    return Checkpoint(str(directory.resolve()), local=True, facts=read_facts(directory))


def check_ready_to_start(prepared: Prepared, environment: Mapping[str, str], say: Say) -> None:
    """Raise `UserError` with every reason why the plan cannot start on this host now."""
    refuse_other_hosts(prepared.plan)
    refuse_missing_packages()
    refuse_old_vllm(prepared.loaded)
    # Files and ports first: that takes no time, vLLM's parser takes seconds.
    problems = find_endpoint_problems(prepared.loaded.spec.proxy, environment) + busy_ports(prepared)
    problems = problems or refused_by_proxy(prepared, environment)
    problems = problems or check_arguments(prepared.plan, default_cache(), environment, say)
    if problems:
        raise SpecError(problems)


def refuse_other_strategies(loaded: LoadedSpec) -> None:
    """Raise `UserError` for a recipe's strategy without prefill and decode pools."""
    recipe = loaded.spec.recipe
    if recipe is not None and loaded.recipe is None and recipe.strategy in (None, "pd_cluster"):
        raise UserError("recipe.hardware: no source says how many devices a node of it has; give --gpus-per-node")
    if recipe is not None and loaded.recipe is None:
        raise UserError(
            f"recipe.strategy {recipe.strategy}: it has no prefill and decode pools, which is what pdcluster launches; "
            f"`pdcluster plan --recipe {recipe.id} --strategy {recipe.strategy}` prints its commands"
        )


def refuse_other_hosts(plan: Plan) -> None:
    """Raise `PlanError` for a plan whose programs run elsewhere: only this host's can be started from here."""
    if plan.followers or any(instance.argv[0] == "vllm" for instance in plan.instances):
        raise PlanError(
            "the plan's instances run on hosts of their own, and `launch` starts programs on this one; "
            "`pdcluster plan --shell` prints each host's command, and the proxy's"
        )


def refuse_old_vllm(loaded: LoadedSpec) -> None:
    """Raise `UserError` where the installed vLLM is older than the recipe asks for, unless that was allowed."""
    installed, recipe = vllm_version(), loaded.recipe
    floor = minimum_vllm(recipe.deployment.selection) if recipe is not None else None
    allowed = loaded.spec.recipe is not None and loaded.spec.recipe.any_vllm
    if floor is not None and installed is not None and is_older(installed, floor) and not allowed:
        raise UserError(f"the recipe needs vLLM {floor}, here is {installed}; upgrade it, or give --any-vllm")


def refused_by_proxy(prepared: Prepared, environment: Mapping[str, str]) -> list[Problem]:
    """Have the proxy check its own flags and files; it starts last, minutes after the engines."""
    program = prepared.plan.proxy
    done = subprocess.run(
        [*program.argv, "--check"],
        env=program.full_environment(environment),
        capture_output=True,
        text=True,
        timeout=_PROXY_CHECK_S,
        check=False,
    )
    if done.returncode == 0:
        return []
    lines = [line.removeprefix("error: ") for line in done.stderr.strip().splitlines()]
    return [Problem("proxy", lines[-1] if lines else f"its check ended with {done.returncode}")]


def refuse_missing_packages() -> None:
    """Raise `UserError` where vLLM or NIXL isn't installed beside us."""
    if vllm_version() is None:
        raise UserError(
            f"vLLM is not installed for {sys.executable}: pip install 'pdcluster[cuda]' on GPUs, "
            "'pdcluster[cpu]' on a CPU host"
        )
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        raise UserError(f"NIXL is not installed for {sys.executable}: pip install nixl")


def busy_ports(prepared: Prepared) -> list[Problem]:
    """Try both addresses and every port of the plan; returns a problem for each that can't be listened on."""
    spec = prepared.loaded.spec
    problems = [
        Problem(key, f"{host}: {error}", "give an address of this host")
        for key, host in (("proxy.host", spec.proxy.host), ("host", spec.host))
        if (error := _bind_error(host, 0))
    ]
    if problems:
        return problems
    for key, port in (("proxy.port", spec.proxy.port), ("proxy.admin_port", spec.proxy.admin_port)):
        error = _bind_error(spec.proxy.host, port) if port else ""
        if error:
            advice = "choose another --port" if key == "proxy.port" else f"choose another --set {key}=..."
            problems.append(Problem(key, f"{spec.proxy.host}:{port}: {error}", advice))
    for instance in prepared.plan.instances:
        for ports in instance.ports:
            for port in ports.ports:
                error = _bind_error(instance.host, port)
                if error:
                    what = f"{instance.host}:{port} ({ports.purpose} of {ports.owner}): {error}"
                    problems.append(Problem("ports.base", what, "choose another --set ports.base=..."))
    return problems


def _bind_error(host: str, port: int) -> str:
    """Return why a server could not listen there, "" where it could."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        return f"no such address ({(error.strerror or str(error)).lower()})"
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def _fit(loaded: LoadedSpec, inventory: Inventory, checkpoint: Checkpoint, say: Say) -> LoadedSpec:
    """Lower replicas to what memory allows, and say so."""
    if checkpoint.facts is None:
        raise PlanError("--fit-memory: the model's size is not known here; set replicas yourself")
    fitting = fit_to_memory(loaded.spec, inventory, checkpoint.facts)
    asked = {role: pool.replicas for role, pool in loaded.spec.pools.items()}
    if fitting == asked:
        return loaded
    available = inventory.available_bytes / 1e9
    say(
        f"memory is short ({available:.1f} GB available): starting {fitting['prefill']} prefill and "
        f"{fitting['decode']} decode engines instead of {asked['prefill']} and {asked['decode']}"
    )
    return with_flags(
        loaded, [Flag(f"pools.{role}.replicas", count, "--fit-memory") for role, count in fitting.items()]
    )
