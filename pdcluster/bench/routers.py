"""The routers that are compared: how each is started, and when it is ready."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pdcluster.errors import UserError

PEER_VERSION = "0.1.17"
_READY_S = 30.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the stand-in engines listen."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    alone: int


@dataclass(frozen=True, slots=True)
class Router:
    """A router that runs. `key` is the API key that it asks for, "" for none."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    key: str = ""

    def cpu_seconds(self) -> float:
        """Return what all its processes have spent so far."""
        return sum(sum(item.cpu_times()[:2]) for item in self._processes())

    def resident_bytes(self) -> int:
        """Return the resident memory of all its processes; what they share counts once."""
        return sum(item.memory_full_info().pss for item in self._processes())

    def stop(self) -> None:
        """End it."""
        stop(self.process)

    def _processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def start_stand_ins(ports: Ports) -> subprocess.Popen[bytes]:
    """Start the engines."""
    arguments = [",".join(map(str, part)) for part in (ports.prefill, ports.decode, (ports.alone,))]
    process = _start([sys.executable, "-m", "pdcluster.bench.stand_ins", *arguments])
    await_ready(process, f"http://127.0.0.1:{ports.alone}/health", "the stand-in engines")
    return process


def start_ours(ports: Ports, workers: int, flags: Sequence[str] = ()) -> Router:
    """Start pdcluster's proxy as users have it: API keys with limits, metrics, probes, all time limits."""
    (port,) = free_ports(1)
    key = secrets.token_hex(16)
    argv = [sys.executable, "-m", "proxy", "--port", str(port), "--workers", str(workers), "--log-level", "error"]
    argv += ["--requests-per-minute", str(10**9), "--tokens-per-minute", str(10**12)]
    process = _start([*argv, *_engines(ports), *flags], {"PDCLUSTER_API_KEYS": f"bench={key}"})
    await_ready(process, f"http://127.0.0.1:{port}/ready", "pdcluster proxy")
    return Router("pdcluster", port, process, key)


def start_vllm_router(ports: Ports, policy: str = "round_robin") -> Router:
    """Start vllm-router, the router of the vLLM project, with its own defaults and one policy for both pools."""
    port, metrics = free_ports(2)
    argv = [find_vllm_router(), "--vllm-pd-disaggregation", "--policy", policy, "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"]
    process = _start([*argv, "--max-concurrent-requests", "100000", *_engines(ports)])
    await_ready(process, f"http://127.0.0.1:{port}/readiness", "vllm-router")
    return Router("vllm-router", port, process)


def start_tcp_relay(ports: Ports) -> Router:
    """Start the bare relay in front of the engine that serves alone."""
    (port,) = free_ports(1)
    process = _start([sys.executable, "-m", "pdcluster.bench.tcp_relay", str(port), str(ports.alone)])
    await_ready(process, f"http://127.0.0.1:{port}/health", "the TCP relay")
    return Router("TCP relay", port, process)


def find_vllm_router() -> str:
    """Return the peer's program; raises `UserError` that says how to get it."""
    beside = Path(sys.executable).with_name("vllm-router")
    found = str(beside) if beside.is_file() else shutil.which("vllm-router")
    if found is None:
        raise UserError(
            f"vllm-router is not installed: pip install 'pdcluster[bench]' (or vllm-router=={PEER_VERSION} anywhere "
            "on PATH), or measure ours alone with --peer none"
        )
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()


def _engines(ports: Ports) -> list[str]:
    pairs = [("--prefill", port) for port in ports.prefill] + [("--decode", port) for port in ports.decode]
    return [token for flag, port in pairs for token in (flag, f"http://127.0.0.1:{port}")]


def _start(argv: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def await_ready(process: subprocess.Popen[bytes], url: str, what: str) -> None:
    """Wait until a server answers 200; raises `UserError`, and ends it, where it does not."""
    deadline = time.monotonic() + _READY_S
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if _answers(url):
                return
            time.sleep(0.1)
    except BaseException:  # an interrupt: nobody else knows of this process yet
        stop(process)
        raise
    stop(process)
    raise UserError(f"{what} did not come up within {_READY_S:g} s; is this machine busy?")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:  # noqa: S310 - a URL of our own making
            return bool(reply.status == 200)  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False
