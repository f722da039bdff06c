"""The routers that are compared: how each is started, and when it is ready."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from pdcluster.errors import LaunchError, UserError

PEER_VERSION = "0.1.17"
_READY_S = 30.0
_SHOWN_BYTES = 2000


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
    argv = [sys.executable, "-m", "pdcluster.bench.stand_ins", *arguments]
    return _start(argv, f"http://127.0.0.1:{ports.alone}/health", "the stand-in engines")


def start_ours(ports: Ports, workers: int, flags: Sequence[str] = ()) -> Router:
    """Start pdcluster's proxy as users have it: API keys with limits, metrics, probes, all time limits."""
    (port,) = free_ports(1)
    key = secrets.token_hex(16)
    argv = [sys.executable, "-m", "proxy", "--port", str(port), "--workers", str(workers), "--log-level", "error"]
    argv += ["--requests-per-minute", str(10**9), "--tokens-per-minute", str(10**12)]
    keys = {"PDCLUSTER_API_KEYS": f"bench={key}"}
    process = _start([*argv, *_engines(ports), *flags], f"http://127.0.0.1:{port}/ready", "pdcluster proxy", keys)
    return Router("pdcluster", port, process, key)


def start_vllm_router(ports: Ports, policy: str = "round_robin") -> Router:
    """Start vllm-router, the router of the vLLM project, with its own defaults and one policy for both pools."""
    port, metrics = free_ports(2)
    argv = [find_vllm_router(), "--vllm-pd-disaggregation", "--policy", policy, "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"]
    argv += ["--max-concurrent-requests", "100000", *_engines(ports)]
    process = _start(argv, f"http://127.0.0.1:{port}/readiness", "vllm-router")
    return Router("vllm-router", port, process)


def start_tcp_relay(ports: Ports) -> Router:
    """Start the bare relay in front of the engine that serves alone."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "pdcluster.bench.tcp_relay", str(port), str(ports.alone)]
    process = _start(argv, f"http://127.0.0.1:{port}/health", "the TCP relay")
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


def _start(argv: list[str], url: str, what: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers 200; raises `LaunchError` with what it said last where it does not."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv, env={**os.environ, **(environment or {})}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            if comes_up(process, url):
                return process
        except BaseException:  # an interrupt: nobody else knows of this process yet
            stop(process)
            raise
        code = process.poll()
        stop(process)
        said = _end_of(output)
    if code is None:
        raise LaunchError(f"{what} was not ready within {_READY_S:g} s; is this machine busy?{said}")
    raise LaunchError(f"{what} ended with exit code {code} before it was ready.{said}")


def comes_up(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until a server answers 200; False where it ended, or took too long."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        if _answers(url):
            return True
        time.sleep(0.1)
    return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:  # noqa: S310 - a URL of our own making
            return bool(reply.status == 200)  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False


def _end_of(output: IO[bytes]) -> str:
    """Return the last lines of what a process printed, in a form that follows a sentence."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _SHOWN_BYTES))
    text = output.read().decode("utf-8", "replace").strip()
    return f" It said:\n{text}" if text else " It said nothing."
