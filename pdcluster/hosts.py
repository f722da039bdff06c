"""Where instances run when each has hosts of its own: one place for each node of each instance. Pure.

Hosts that nobody has named yet are variables, so that a plan can be read without a cluster; nothing starts with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdcluster.engine_args import Slot
from pdcluster.errors import PlanError, Problem, SpecError
from pdcluster.inventory import Inventory
from pdcluster.slots import PlacedInstance, port_ranges
from pdcluster.spec import ClusterSpec, PoolSpec, Role


def place_on_hosts(spec: ClusterSpec, inventory: Inventory) -> tuple[PlacedInstance, ...]:
    """Give every node of every instance its host; `inventory` is what each of the hosts has.

    Raises `PlanError` where a host has too few devices, `SpecError` for hosts that don't fit the pools.
    """
    addresses = {role: host_addresses(role, pool) for role, pool in spec.pools.items()}
    _refuse_clashes(spec, addresses)
    return tuple(
        place for role, pool in spec.pools.items() for place in _places(spec, role, pool, addresses[role], inventory)
    )


def host_addresses(role: Role, pool: PoolSpec) -> tuple[str, ...]:
    """Return the address of each node of each instance in turn; a variable where the spec names no host."""
    if pool.hosts is not None:
        return pool.hosts
    return tuple(
        f"${role.upper()}_{index}_NODE_{node + 1}" for index in range(pool.replicas) for node in range(pool.nodes)
    )


def _refuse_clashes(spec: ClusterSpec, addresses: Mapping[Role, tuple[str, ...]]) -> None:
    problems = []
    seen: dict[str, str] = {}
    for role, pool in spec.pools.items():
        needed = pool.replicas * pool.nodes
        if len(addresses[role]) != needed:
            what = f"{len(addresses[role])} hosts for {pool.replicas} instances of {pool.nodes} nodes"
            problems.append(Problem(f"pools.{role}.hosts", what, f"name {needed}"))
        for host in addresses[role]:
            if host in seen:
                what = f"{host} is named twice (first in pools.{seen[host]}.hosts)"
                problems.append(Problem(f"pools.{role}.hosts", what, "give each node a host of its own"))
            seen.setdefault(host, role)
    if problems:
        raise SpecError(problems)


def _places(
    spec: ClusterSpec, role: Role, pool: PoolSpec, addresses: tuple[str, ...], inventory: Inventory
) -> Iterator[PlacedInstance]:
    devices = _devices(role, pool, inventory)
    for index in range(pool.replicas):
        for node in range(pool.nodes):
            name = f"{role}-{index}" + (f"-node-{node + 1}" if pool.nodes > 1 else "")
            ranges = tuple(port_ranges(name, spec.ports.base, pool))
            first = {ports.purpose: ports.first for ports in ranges}
            slot = Slot(
                role=role,
                host=addresses[index * pool.nodes + node],
                kind=inventory.kind,
                devices=devices,
                threads=max(1, inventory.core_count),
                binding="nobind",
                http_port=first["http"],
                side_channel_port=first["nixl side channel"],
                events_port=first["kv events"],
                replay_port=first.get("kv events replay", 0),
                dp_rpc_port=first["data-parallel rpc"],
                nodes=pool.nodes,
                node=node,
                head=addresses[index * pool.nodes],
            )
            yield PlacedInstance(name, slot, ranges)


def _devices(role: Role, pool: PoolSpec, inventory: Inventory) -> tuple[int, ...]:
    """Return the devices of one node: as many of a host's first ones as its ranks take."""
    if inventory.kind == "cpu":
        return ()
    needed, have = pool.world_size // pool.nodes, [device.index for device in inventory.devices]
    allowed = [index for index in have if pool.devices is None or index in pool.devices]
    if needed > len(allowed):
        raise PlanError(
            f"pools.{role}: {needed} devices are needed on each host, {inventory.hardware or 'a host'} has "
            f"{len(allowed)}; raise nodes or lower parallel sizes"
        )
    return tuple(allowed[:needed])
