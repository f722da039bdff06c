"""Spec and inventory -> Plan: what runs where with which ports, argv and environment. Pure and repeatable.

The plan is all that a backend needs: nothing is decided after it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster.compat import find_problems
from pdcluster.engine_args import (
    MODULE,
    PROXY_SECRETS,
    Argument,
    Variable,
    build_arguments,
    build_environment,
    scrub,
)
from pdcluster.errors import SpecError
from pdcluster.hosts import place_on_hosts
from pdcluster.inventory import Inventory, Kind
from pdcluster.kv_events import subscriptions
from pdcluster.kv_transfer import lease_seconds
from pdcluster.memory import refuse_too_little_memory
from pdcluster.model_facts import Checkpoint
from pdcluster.node_args import serves
from pdcluster.recipe_layer import recipe_notes
from pdcluster.recipes.substitution import shell_quote
from pdcluster.slots import PlacedInstance, PortRange, place_instances
from pdcluster.spec import ProxySpec, Role
from pdcluster.spec_loading import LoadedSpec

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
REDACTED = "(hidden)"


@dataclass(frozen=True, slots=True)
class Program:
    """A process to start: argv, what is set in its environment, and the URL it will answer on."""

    name: str
    argv: tuple[str, ...]
    environment: tuple[Variable, ...]
    url: str

    def full_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return what the program is started with; `inherited` is the launcher's own environment."""
        own = {
            variable.name: variable.value if variable.taken_from is None else inherited[variable.taken_from]
            for variable in self.environment
        }
        return scrub(inherited) | own

    def shown_environment(self) -> dict[str, str]:
        """Return the environment with values of secret-looking names hidden."""
        return {
            variable.name: REDACTED if _SECRET.search(variable.name) else variable.value
            for variable in self.environment
        }

    def shell(self, *, variables: bool = False) -> str:
        """Return one line for a POSIX shell; a hidden value is taken from the shell's own environment.

        With `variables` a recipe's variables are left for the shell to fill in.
        """
        quote = shell_quote if variables else shlex.quote
        settings = [
            f'{variable.name}="${{{variable.taken_from or variable.name}}}"'
            if _SECRET.search(variable.name)
            else f"{variable.name}={quote(variable.value)}"
            for variable in self.environment
        ]
        return " ".join([*settings, *(quote(token) for token in self.argv)])


@dataclass(frozen=True, slots=True)
class Instance(Program):
    """One engine: a program with a role, its place on the host and the origin of every argument."""

    role: Role
    host: str
    kind: Kind
    devices: tuple[int, ...]
    threads: int
    binding: str
    ports: tuple[PortRange, ...]
    arguments: tuple[Argument, ...]
    node: int = 0

    def full_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return what the engine is started with: without the proxy's secrets."""
        environment = Program.full_environment(self, inherited)
        return {name: value for name, value in environment.items() if name not in PROXY_SECRETS}

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json` and cluster.json; secrets are hidden."""
        return {
            "name": self.name,
            "role": self.role,
            "host": self.host,
            "node": self.node,
            "url": self.url,
            "devices": {"kind": self.kind, "indices": list(self.devices)},
            "cpu": {"threads": self.threads, "binding": self.binding},
            "ports": {ports.purpose: list(ports.ports) for ports in self.ports},
            "argv": list(self.argv),
            "arguments": [{"tokens": list(argument.tokens), "origin": argument.origin} for argument in self.arguments],
            "environment": self.shown_environment(),
            "environment_origins": {variable.name: variable.origin for variable in self.environment},
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole cluster, ready to start. `notes` are for a person: what was assumed or couldn't be checked.

    `followers` are the further nodes of instances that span several and have one server, on the first.
    """

    name: str
    model: str
    served_model_name: str
    instances: tuple[Instance, ...]
    proxy: Program
    notes: tuple[str, ...]
    followers: tuple[Instance, ...] = ()

    def of_role(self, role: Role) -> tuple[Instance, ...]:
        """Return the instances of one pool."""
        return tuple(instance for instance in self.instances if instance.role == role)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the same for the same input."""
        return {
            "name": self.name,
            "model": self.model,
            "served_model_name": self.served_model_name,
            "instances": [instance.to_json() for instance in self.instances],
            "proxy": {
                "url": self.proxy.url,
                "argv": list(self.proxy.argv),
                "environment": self.proxy.shown_environment(),
            },
            "notes": list(self.notes),
            **({"followers": [follower.to_json() for follower in self.followers]} if self.followers else {}),
        }


def make_plan(
    loaded: LoadedSpec,
    inventory: Inventory,
    checkpoint: Checkpoint,
    python: str,
    *,
    keyed: bool = False,
) -> Plan:
    """Make the plan, or raise `SpecError` (rules broken) or `PlanError` (this host cannot carry it).

    `python` is the interpreter that runs engines and proxy; `keyed` is true where engines ask for a key.
    """
    spec = loaded.spec
    problems = find_problems(spec, checkpoint.facts)
    if problems:
        raise SpecError(problems)
    own_hosts = on_own_hosts(loaded, inventory)
    placed = place_on_hosts(spec, inventory) if own_hosts else place_instances(spec, inventory)
    if not own_hosts:
        refuse_too_little_memory(spec, inventory, checkpoint.facts)
    programs = tuple(_instance(loaded, place, checkpoint, python, keyed=keyed) for place in placed)
    instances = tuple(program for program in programs if serves(getattr(spec.pools, program.role), program.node))
    return Plan(
        name=spec.name,
        model=checkpoint.location,
        served_model_name=spec.served_name,
        instances=instances,
        proxy=plan_proxy(loaded, instances, python),
        notes=tuple(_notes(loaded, inventory, checkpoint)),
        followers=tuple(program for program in programs if program not in instances),
    )


def on_own_hosts(loaded: LoadedSpec, inventory: Inventory) -> bool:
    """Tell whether instances have hosts of their own: a pool names or spans some, or the hardware is a recipe's."""
    recipe = loaded.spec.recipe
    declared = inventory.hardware is not None and not (recipe is not None and recipe.colocated)
    return declared or any(pool.spans_hosts for _, pool in loaded.spec.pools.items())


def plan_proxy(
    loaded: LoadedSpec,
    instances: tuple[Instance, ...],
    python: str,
    excluded: tuple[tuple[str, str], ...] = (),
) -> Program:
    """Return the proxy's program; `excluded` are (prefill, decode) names that must not serve together."""
    proxy = loaded.spec.proxy
    lease = lease_seconds(loaded.spec, instances[0].kind)
    argv = [python, "-m", "proxy", "--host", proxy.host, "--port", str(proxy.port)]
    for instance in instances:
        argv += [f"--{instance.role}", f"{instance.name}={instance.url}"]
    for instance in instances:
        ports = {ports.purpose: ports.first for ports in instance.ports}
        events, replay = ports["kv events"], ports.get("kv events replay", 0)
        argv += subscriptions(instance.name, instance.host, events, replay, getattr(loaded.spec.pools, instance.role))
    for prefill, decode in excluded:
        argv += ["--exclude-pair", f"{prefill}:{decode}"]
    argv += ["--connector", loaded.spec.connector, "--fallback", proxy.fallback]
    argv += ["--max-body-mb", str(proxy.max_body_mb), "--lease-seconds", str(lease)]
    argv += _endpoint_arguments(proxy)
    argv += ["--shutdown-grace", f"{loaded.spec.launch.stop_grace:g}", *proxy.extra_args]
    return Program("proxy", tuple(argv), (), http_url(proxy.host, proxy.port, tls=proxy.tls))


def proxy_probe_url(proxy: ProxySpec) -> str:
    """Return where the launcher asks for the proxy's health; it has no certificate to show where clients need one."""
    if proxy.tls_client_ca is not None:
        return http_url("127.0.0.1", proxy.admin_port)
    return http_url(proxy.host, proxy.port, tls=proxy.tls)


def _endpoint_arguments(proxy: ProxySpec) -> list[str]:
    """Return the flags of what was set; keys themselves are in a file or the environment, never here."""
    values = {
        "--workers": proxy.workers if proxy.workers > 1 else None,
        "--api-key-file": proxy.api_key_file,
        "--requests-per-minute": proxy.requests_per_minute,
        "--tokens-per-minute": proxy.tokens_per_minute,
        "--tls-certificate": proxy.tls_certificate,
        "--tls-key": proxy.tls_key,
        "--tls-client-ca": proxy.tls_client_ca,
        "--admin-port": proxy.admin_port or None,
    }
    argv = [token for flag, value in values.items() if value is not None for token in (flag, str(value))]
    return argv + [token for origin in proxy.cors_origins for token in ("--cors-origin", origin)]


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL of a server; an IPv6 address is bracketed, a wildcard address is reached on loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _instance(
    loaded: LoadedSpec, place: PlacedInstance, checkpoint: Checkpoint, python: str, *, keyed: bool
) -> Instance:
    slot = place.slot
    arguments = build_arguments(loaded, slot, checkpoint)
    tokens = tuple(token for argument in arguments for token in argument.tokens)
    # Several nodes need the modes of `vllm serve`, and the python there is that host's own.
    elsewhere = slot.nodes > 1 or slot.head
    argv = ("vllm", "serve", *tokens[1:]) if elsewhere else (python, "-m", MODULE, *tokens)
    return Instance(
        name=place.name,
        argv=argv,
        environment=build_environment(loaded, slot, offline=checkpoint.local, keyed=keyed),
        url=http_url(slot.host, slot.http_port),
        role=slot.role,
        host=slot.host,
        kind=slot.kind,
        devices=slot.devices,
        threads=slot.threads,
        binding=slot.binding,
        ports=place.ports,
        arguments=arguments,
        node=slot.node,
    )


def _notes(loaded: LoadedSpec, inventory: Inventory, checkpoint: Checkpoint) -> list[str]:
    notes = recipe_notes(loaded.recipe) if loaded.recipe is not None else []
    if inventory.hardware is not None:
        notes.append(f"planned for {inventory.hardware} as its profile declares it: no host was looked at")
    if inventory.kind == "cpu":
        notes.append("no accelerator was found: engines run on CPU cores, which is for trials and tests")
    if checkpoint.facts is None:
        missing = "is made at the first launch" if checkpoint.local else "is not on this machine"
        notes.append(f"the checkpoint {missing}: context length, heads and memory were not checked")
    return notes
