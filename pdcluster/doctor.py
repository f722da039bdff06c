"""Examine a machine: can a cluster run here, and what to do where it can't."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pdcluster.argv_check import vllm_version
from pdcluster.engine_args import SCRUBBED, SCRUBBED_PREFIXES, scrub
from pdcluster.inventory import take_inventory

_GB = 1e9
_FEW_FILES = 4096
_LITTLE_DISK_GB = 5
_LITTLE_SHM_GB = 1
_CPU_ENGINE_GB = 2.7  # one smollm2 engine, measured
_IMPORT_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at, what was seen, and what to do."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    detail: str
    advice: str = ""


def examine(environment: Mapping[str, str]) -> list[Finding]:
    """Look at everything; slow (vLLM is imported in another process)."""
    return [
        Finding("ok", "python", f"{platform.python_version()} at {sys.executable}"),
        *_packages(environment),
        *_hardware(environment),
        *_limits(),
        *_inherited(environment),
    ]


def _packages(environment: Mapping[str, str]) -> Iterator[Finding]:
    version = vllm_version()
    if version is None:
        yield Finding(
            "fail", "vllm", "not installed", "pip install 'pdcluster[cuda]' or, on a CPU host, 'pdcluster[cpu]'"
        )
    else:
        error = _import_error("vllm.entrypoints.openai.api_server", environment)
        advice = "pip uninstall -y torchvision torchaudio torchcodec" if "torchvision" in error else ""
        yield (
            Finding("fail", "vllm", f"{version}, import fails: {error}", advice)
            if error
            else Finding("ok", "vllm", version)
        )
    if importlib.util.find_spec("torchvision") is not None and (error := _import_error("torchvision", environment)):
        yield Finding(
            "fail", "torchvision", error, "pip uninstall -y torchvision torchaudio torchcodec (text needs none)"
        )
    nixl = next((name for name in ("nixl", "nixl-cu13", "nixl-cu12") if _version(name)), None)
    if nixl is None:
        yield Finding("fail", "nixl", "not installed", "pip install nixl")
    else:
        yield Finding("ok", "nixl", f"{_version(nixl)}")
    lmcache = _version("lmcache")
    yield Finding("ok", "lmcache", lmcache or "not installed (optional)")
    if _version("proxy.py"):
        yield Finding("fail", "proxy.py", "installed: its import name `proxy` is ours too", "pip uninstall -y proxy.py")


def _hardware(environment: Mapping[str, str]) -> Iterator[Finding]:
    inventory = take_inventory(environment)
    if inventory.devices:
        names = ", ".join(f"{device.index}: {device.name}" for device in inventory.devices)
        yield Finding("ok", "devices", f"{len(inventory.devices)} {inventory.kind} ({names})")
    else:
        yield Finding("warn", "devices", "no accelerator found: engines run on CPU cores", "for trials only")
    yield Finding("ok", "cores", f"{inventory.core_count} on {len(inventory.cores)} NUMA nodes")
    available = inventory.available_bytes / _GB
    detail = f"{available:.1f} GB of {inventory.memory_bytes / _GB:.1f} GB available"
    if inventory.kind == "cpu":
        engines = int(available / _CPU_ENGINE_GB)
        level: Literal["ok", "fail"] = "ok" if engines > 1 else "fail"
        yield Finding(
            level, "memory", f"{detail}: room for about {engines} smollm2 engines", "" if engines > 1 else "free some"
        )
    else:
        yield Finding("ok", "memory", detail)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        yield Finding("warn", "open files", f"limit {soft}", f"ulimit -n {min(hard, 65536)}: each stream takes two")
    else:
        yield Finding("ok", "open files", f"limit {soft}")
    for path, least in (("/tmp", _LITTLE_DISK_GB), ("/dev/shm", _LITTLE_SHM_GB)):  # noqa: S108 - looked at, not used
        try:
            free = shutil.disk_usage(path).free / _GB
        except OSError:
            yield Finding("warn", path, "not there")
            continue
        advice = "" if free >= least else f"less than {least} GB: engines may fail"
        yield Finding("warn" if advice else "ok", path, f"{free:.1f} GB free", advice)


def _inherited(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environment):
        if name in SCRUBBED or name.startswith(SCRUBBED_PREFIXES):
            yield Finding("warn", name, f"is set; engines won't see it: it {SCRUBBED.get(name, 'breaks them')}")


def _import_error(module: str, environment: Mapping[str, str]) -> str:
    """Return the last line of the error when `module` is imported in a fresh process, "" if it works."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_IMPORT_TIMEOUT_S,
            env=scrub(environment),
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_IMPORT_TIMEOUT_S} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
