"""Which devices, cores and ports each instance gets on one host. Pure: the same input, the same answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdcluster.engine_args import Slot
from pdcluster.errors import PlanError, Problem, SpecError
from pdcluster.inventory import Device, Inventory
from pdcluster.spec import ClusterSpec, PoolSpec, Role

# Below this many cores a rank shares the host's cores freely instead of being bound to its own.
_CORES_WORTH_BINDING = 4


@dataclass(frozen=True, slots=True)
class PortRange:
    """`count` ports from `first`, held by `owner` for `purpose`."""

    owner: str
    purpose: str
    first: int
    count: int = 1

    @property
    def ports(self) -> range:
        """The ports themselves."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """An instance's name, its slot and the ports it holds."""

    name: str
    slot: Slot
    ports: tuple[PortRange, ...]


def place_instances(spec: ClusterSpec, inventory: Inventory) -> tuple[PlacedInstance, ...]:
    """Give every instance its place; raises `PlanError` where the host has too little, `SpecError` for ports."""
    members = [(role, index, pool) for role, pool in spec.pools.items() for index in range(pool.replicas)]
    devices = _assign_devices(spec, inventory)
    cores = _assign_cores([pool.world_size for _, _, pool in members], inventory)
    placed, port = [], spec.ports.base
    for (role, index, pool), (threads, binding) in zip(members, cores, strict=True):
        name = f"{role}-{index}"
        ranges = tuple(port_ranges(name, port, pool))
        first = {ports.purpose: ports.first for ports in ranges}
        port = ranges[-1].ports.stop
        slot = Slot(
            role=role,
            host=spec.host,
            kind=inventory.kind,
            devices=devices.get(name, ()),
            threads=threads,
            binding=binding,
            http_port=first["http"],
            side_channel_port=first["nixl side channel"],
            events_port=first["kv events"],
            replay_port=first.get("kv events replay", 0),
            dp_rpc_port=first["data-parallel rpc"],
        )
        placed.append(PlacedInstance(name, slot, ranges))
    _refuse_port_clash(spec, placed)
    return tuple(placed)


def port_ranges(name: str, first: int, pool: PoolSpec) -> Iterator[PortRange]:
    """Yield an instance's block of ports, so that no two overlap: HTTP, one a DP rank for each channel, DP RPC."""
    ranks = pool.data_parallel_size
    for purpose, count in (
        ("http", 1),
        ("nixl side channel", ranks),
        ("kv events", ranks),
        *((("kv events replay", ranks),) if pool.kv_events else ()),
        ("data-parallel rpc", 1),
    ):
        yield PortRange(name, purpose, first, count)
        first += count


def _refuse_port_clash(spec: ClusterSpec, placed: Sequence[PlacedInstance]) -> None:
    last = placed[-1].ports[-1].ports.stop - 1
    problems = []
    if last > 65535:  # noqa: PLR2004 - the largest port number
        problems.append(Problem("ports.base", f"the engines' ports would reach {last}, past 65535", "use a lower base"))
    own = {"proxy.port": spec.proxy.port} | (
        {"proxy.admin_port": spec.proxy.admin_port} if spec.proxy.admin_port else {}
    )
    if len(set(own.values())) < len(own):
        problems.append(Problem("proxy.admin_port", f"{spec.proxy.port} is proxy.port too", "choose another port"))
    for instance in placed:
        for ports in instance.ports:
            for key, port in own.items():
                if port in ports.ports:
                    what = f"{port} is the {ports.purpose} port of {ports.owner} too"
                    problems.append(Problem(key, what, f"choose a port outside {spec.ports.base}-{last}"))
    if problems:
        raise SpecError(problems)


def _assign_devices(spec: ClusterSpec, inventory: Inventory) -> dict[str, tuple[int, ...]]:
    if inventory.kind == "cpu":
        _refuse_devices_on_cpu(spec)
        return {}
    _refuse_unknown_devices(spec, inventory)
    needed = {role: pool.replicas * pool.world_size for role, pool in spec.pools.items()}
    if sum(needed.values()) > len(inventory.devices):
        detail = " + ".join(f"{role} {pool.replicas} x {pool.world_size}" for role, pool in spec.pools.items())
        raise PlanError(
            f"pools: {sum(needed.values())} {inventory.kind} devices are needed ({detail}), this host has "
            f"{len(inventory.devices)}; lower replicas or parallel sizes"
        )
    # A pool that names its devices chooses first, or the other pool might take them.
    order = sorted(spec.pools.items(), key=lambda item: item[1].devices is None)
    free = {device.index: device for device in inventory.devices}
    assigned: dict[str, tuple[int, ...]] = {}
    for role, pool in order:
        for index in range(pool.replicas):
            allowed = [device for device in free.values() if pool.devices is None or device.index in pool.devices]
            chosen = _pick_devices(allowed, pool.world_size, role, index)
            assigned[f"{role}-{index}"] = tuple(device.index for device in chosen)
            for device in chosen:
                del free[device.index]
    return assigned


def _pick_devices(allowed: Sequence[Device], count: int, role: Role, index: int) -> Sequence[Device]:
    """Take `count` devices from the fullest NUMA node that has them; across nodes only where none has."""
    if len(allowed) < count:
        raise PlanError(
            f"pools.{role}.devices: {role}-{index} needs {count} devices, {len(allowed)} of those allowed are free; "
            "name more devices or lower replicas"
        )
    nodes: dict[int | None, list[Device]] = defaultdict(list)
    for device in allowed:
        nodes[device.numa_node].append(device)
    fitting = [node for node in nodes.values() if len(node) >= count]
    pool = min(fitting, key=len) if fitting else list(allowed)
    return pool[:count]


def _refuse_devices_on_cpu(spec: ClusterSpec) -> None:
    for role, pool in spec.pools.items():
        if pool.devices is not None:
            raise PlanError(
                f"pools.{role}.devices: this host has no accelerator that can be seen (CPU only); remove the key, "
                "or run `pdcluster doctor` to see what was looked for"
            )


def _refuse_unknown_devices(spec: ClusterSpec, inventory: Inventory) -> None:
    known = [device.index for device in inventory.devices]
    for role, pool in spec.pools.items():
        unknown = [index for index in pool.devices or () if index not in known]
        if unknown:
            raise PlanError(f"pools.{role}.devices: no device {unknown[0]} on this host; there are {known}")
        if len(set(pool.devices or ())) != len(pool.devices or ()):
            raise PlanError(f"pools.{role}.devices: a device is named twice; name each once")


def _assign_cores(world_sizes: Sequence[int], inventory: Inventory) -> Iterator[tuple[int, str]]:
    """Yield (threads a rank, binding) for each instance, in `VLLM_CPU_OMP_THREADS_BIND`'s form.

    Ranks are bound to cores of one NUMA node where there are enough; else threads float ("nobind").
    """
    ranks = sum(world_sizes)
    threads = max(1, inventory.core_count // ranks)
    blocks = [
        cores[start : start + threads]
        for cores in inventory.cores.values()
        for start in range(0, len(cores) - threads + 1, threads)
    ]
    bound = inventory.kind == "cpu" and threads >= _CORES_WORTH_BINDING and len(blocks) >= ranks
    taken = iter(blocks)
    for size in world_sizes:
        if bound:
            yield threads, "|".join(",".join(str(core) for core in next(taken)) for _ in range(size))
        else:
            yield threads, "nobind"
