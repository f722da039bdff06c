"""Simulated engines for comparing routers: started for one run and ended after it, so that each finds empty caches.

A program of engines is run as `PROGRAM PREFILL_PORTS DECODE_PORTS [--slow PORT:FACTOR]` (ports comma-separated); by GET
/stats on its first prefill port it tells `per_prefill` and `per_decode`, requests by port, and `cached_share`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from pdcluster.bench.routers import Ports, comes_up, stop
from pdcluster.errors import LaunchError, UserError

_STATS_S = 10


@dataclass(frozen=True, slots=True)
class Slow:
    """The first engine of a role is so many times slower than the others."""

    role: Literal["prefill", "decode"]
    factor: float

    def __str__(self) -> str:
        return f"{self.role}:{self.factor:g}"


@dataclass(frozen=True, slots=True)
class Served:
    """What engines say they served: requests by engine, in the order of the ports, and the cached share of prompts."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    cached_share: float | None


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines that run, all in one process."""

    ports: Ports
    process: subprocess.Popen[bytes]
    complaints: IO[bytes]

    def cpu_seconds(self) -> float:
        """Return what their process has spent so far."""
        return float(sum(psutil.Process(self.process.pid).cpu_times()[:2]))

    def served(self) -> Served:
        """Ask what they served; raises `LaunchError` where they are gone."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.prefill[0]}/stats", timeout=_STATS_S) as reply:
                told = json.loads(reply.read())
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise LaunchError(f"the simulated engines did not say what they served: {error}{self.said()}") from None
        return _served(told, self.ports)

    def said(self) -> str:
        """Return the end of what they wrote to their error stream, "" for nothing."""
        self.complaints.seek(0)
        last = self.complaints.read().decode(errors="replace").strip().splitlines()[-1:]
        return f" ({last[0]})" if last else ""

    def stop(self) -> None:
        """End them."""
        stop(self.process)
        self.complaints.close()


def parse_slow(text: str) -> Slow:
    """Return what ROLE:FACTOR says; raises `UserError`."""
    role, _, factor = text.partition(":")
    try:
        number = float(factor)
    except ValueError:
        number = 0.0
    if role not in ("prefill", "decode") or not number > 1:
        raise UserError(f"--slow {text}: must be prefill:FACTOR or decode:FACTOR with a factor above 1, as decode:5")
    return Slow("prefill" if role == "prefill" else "decode", number)


def start_engines(program: Path, ports: Ports, slow: Slow | None = None) -> Engines:
    """Start engines on these ports; raises `UserError` where they do not come up."""
    argv = [sys.executable, str(program), *(",".join(map(str, part)) for part in (ports.prefill, ports.decode))]
    if slow is not None:
        port = (ports.prefill if slow.role == "prefill" else ports.decode)[0]
        argv += ["--slow", f"{port}:{slow.factor:g}"]
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the engines
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=complaints)
    engines = Engines(ports, process, complaints)
    try:
        if comes_up(process, f"http://127.0.0.1:{ports.decode[-1]}/v1/models"):
            return engines
    except BaseException:  # an interrupt: nobody else knows of this process yet
        stop(process)
        complaints.close()
        raise
    stop(process)
    said = engines.said()
    complaints.close()
    raise UserError(f"{program}: these engines did not come up; is this machine busy?{said}")


def _served(told: dict[str, Any], ports: Ports) -> Served:
    def counts(key: str, of: tuple[int, ...]) -> tuple[int, ...]:
        found = told.get(key) or {}
        return tuple(int(found.get(str(port), 0)) for port in of)

    return Served(counts("per_prefill", ports.prefill), counts("per_decode", ports.decode), told.get("cached_share"))
