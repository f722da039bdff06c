"""What a host has: accelerators, memory, cores and their NUMA nodes.

NVIDIA devices come from NVML; ROCm and Ascend devices from the variable that makes them visible (their
management libraries are not dependencies of ours); a host with none of them serves on its CPU cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from pdcluster.errors import UserError

Kind = Literal["cuda", "rocm", "ascend", "cpu"]

# The variable that limits an engine to its own devices, by kind; also how ROCm and Ascend devices are found.
VISIBLE_VARIABLE: Mapping[Kind, str] = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "HIP_VISIBLE_DEVICES",
    "ascend": "ASCEND_RT_VISIBLE_DEVICES",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator; memory in bytes, None where it cannot be known from outside an engine."""

    index: int
    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """One host's devices, usable cores by NUMA node, and memory in bytes."""

    kind: Kind
    devices: tuple[Device, ...] = ()
    cores: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: {0: (0,)})
    memory_bytes: int = 0
    available_bytes: int = 0
    hardware: str | None = None  # the profile that declares it, None for a host that was looked at

    @property
    def core_count(self) -> int:
        """Number of cores that this process may use."""
        return sum(len(cores) for cores in self.cores.values())


def take_inventory(environment: Mapping[str, str], root: Path = Path("/")) -> Inventory:
    """Look at this host; `root` stands for the file system's root, for tests."""
    kind, devices = _find_devices(environment, root)
    memory = psutil.virtual_memory()
    limit = _cgroup_headroom(root)
    return Inventory(
        kind=kind,
        devices=devices,
        cores=_cores(root),
        memory_bytes=memory.total,
        available_bytes=min(memory.available, limit) if limit is not None else memory.available,
    )


def _find_devices(environment: Mapping[str, str], root: Path) -> tuple[Kind, tuple[Device, ...]]:
    nvidia = _nvidia_devices(root)
    visible = environment.get(VISIBLE_VARIABLE["cuda"])
    if nvidia and visible is not None:
        nvidia = _visible(nvidia, visible)
    if nvidia:
        return "cuda", tuple(device for device, _ in nvidia)
    accelerators: tuple[Kind, ...] = ("rocm", "ascend")
    for kind in accelerators:
        listed = environment.get(VISIBLE_VARIABLE[kind], "")
        if listed.strip():
            return kind, tuple(Device(index, f"{kind} device") for index in _indices(listed, VISIBLE_VARIABLE[kind]))
    return "cpu", ()


def _indices(listed: str, variable: str) -> list[int]:
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise UserError(f"{variable}={listed}: a list of device numbers is needed here, such as 0,1,2")
    return [int(part) for part in parts]


def _visible(devices: Sequence[tuple[Device, str]], visible: str) -> list[tuple[Device, str]]:
    """Keep what CUDA_VISIBLE_DEVICES names, by number or by (the beginning of) a UUID; CUDA's own rules."""
    chosen = []
    for entry in (part.strip() for part in visible.split(",")):
        match = [pair for pair in devices if entry == str(pair[0].index) or (entry and pair[1].startswith(entry))]
        if not match:  # CUDA ignores the first unknown entry and all that follow
            break
        chosen.append(match[0])
    return chosen


def _nvidia_devices(root: Path) -> list[tuple[Device, str]]:
    """Ask NVML; returns each device with its UUID, nothing where there is no driver."""
    import pynvml  # noqa: PLC0415 - only a host with a driver needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_nvidia_device(pynvml, index, handle, root) for index, handle in enumerate(handles)]
    finally:
        pynvml.nvmlShutdown()


def _nvidia_device(pynvml: Any, index: int, handle: Any, root: Path) -> tuple[Device, str]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    bus = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    node = _read_int(root / "sys/bus/pci/devices" / bus.removeprefix("0000") / "numa_node")
    device = Device(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        numa_node=node if node is not None and node >= 0 else None,
    )
    return device, _text(pynvml.nvmlDeviceGetUUID(handle))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cores(root: Path) -> dict[int, tuple[int, ...]]:
    """Return the usable cores of each NUMA node; one node 0 where the kernel doesn't say."""
    usable = os.sched_getaffinity(0)
    nodes: dict[int, tuple[int, ...]] = {}
    for directory in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        try:
            listed = _cpu_list((directory / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        cores = tuple(core for core in listed if core in usable)
        if cores:
            nodes[int(directory.name.removeprefix("node"))] = cores
    return nodes or {0: tuple(sorted(usable))}


def _cpu_list(text: str) -> list[int]:
    """Parse the kernel's "0-3,8" form."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def _cgroup_headroom(root: Path) -> int | None:
    """Bytes left below a cgroup v2 memory limit, None where there is no limit."""
    limit = _read_int(root / "sys/fs/cgroup/memory.max")
    used = _read_int(root / "sys/fs/cgroup/memory.current")
    return max(0, limit - used) if limit is not None and used is not None else None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None
