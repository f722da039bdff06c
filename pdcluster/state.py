"""The run directory of a cluster: cluster.json, logs, and the lock that keeps a second launcher out.

    <home>/clusters/NAME/cluster.json   what runs, written atomically at each change
    <home>/clusters/NAME/launch.lock    held by the launcher for its whole life
    <home>/clusters/NAME/logs/*.log     one a process

`<home>` is $PDCLUSTER_HOME, else $XDG_STATE_HOME/pdcluster, else ~/.local/state/pdcluster.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pdcluster.errors import StateError
from pdcluster.spec import NAME_PATTERN

ClusterPhase = Literal["starting", "warming", "ready", "stopping", "stopped", "failed"]
ProcessPhase = Literal["starting", "healthy", "restarting", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process of the cluster. `started` is its start time as the kernel has it, in seconds since the epoch."""

    name: str
    role: str
    url: str
    phase: ProcessPhase = "starting"
    pid: int | None = None
    started: float | None = None
    restarts: int = 0
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The content of cluster.json."""

    name: str
    run_id: str
    phase: ClusterPhase
    launcher_pid: int
    launcher_started: float
    boot_id: str
    url: str
    model: str
    processes: Mapping[str, ProcessRecord] = field(default_factory=dict)
    excluded_pairs: tuple[tuple[str, str], ...] = ()
    message: str = ""
    exit_code: int = 0
    written: float = 0.0
    plan: Mapping[str, Any] = field(default_factory=dict)

    def with_process(self, record: ProcessRecord) -> ClusterRecord:
        """Return a copy in which this process is replaced or added."""
        return replace(self, processes={**self.processes, record.name: record})


def default_home(environment: Mapping[str, str]) -> Path:
    """Return where run directories live."""
    if environment.get("PDCLUSTER_HOME"):
        return Path(environment["PDCLUSTER_HOME"]).expanduser()
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "pdcluster"


def boot_id() -> str:
    """Return the kernel's id of this boot: process ids of another boot mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One cluster's directory."""

    path: Path

    @classmethod
    def of(cls, home: Path, name: str) -> RunDirectory:
        """Return the directory of the cluster called `name`; a name that could be a path is a `StateError`."""
        if not re.fullmatch(NAME_PATTERN, name):
            raise StateError(f"--name {name}: a cluster's name has small letters, digits and hyphens only")
        return cls(home / "clusters" / name)

    @property
    def logs(self) -> Path:
        """Where the logs are."""
        return self.path / "logs"

    def log(self, process: str) -> Path:
        """Return the log of one process."""
        return self.logs / f"{process}.log"

    def create(self) -> None:
        """Make the directory, readable by its owner only: logs and argv are nobody else's business."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
        except OSError as error:
            raise StateError(
                f"{self.path}: cannot be made ({error.strerror}); set PDCLUSTER_HOME to a directory that can be written"
            ) from error

    def write(self, record: ClusterRecord) -> None:
        """Replace cluster.json atomically."""
        target = self.path / "cluster.json"
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(replace(record, written=time.time())), indent=1), encoding="utf-8")
        temporary.replace(target)

    def read(self) -> ClusterRecord | None:
        """Return what cluster.json says, None where there is none; a damaged file is a `StateError`."""
        path = self.path / "cluster.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            processes = {name: ProcessRecord(**record) for name, record in data.pop("processes").items()}
            excluded = tuple((prefill, decode) for prefill, decode in data.pop("excluded_pairs"))
            return ClusterRecord(**data, processes=processes, excluded_pairs=excluded)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError(
                f"{path}: cannot be read ({error}); if no process of this cluster runs, remove its directory"
            ) from error

    def must_read(self) -> ClusterRecord:
        """Return the record, or raise `StateError` naming the clusters that there are."""
        record = self.read()
        if record is None:
            others = sorted(entry.parent.name for entry in self.path.parent.glob("*/cluster.json"))
            known = f"known: {', '.join(others)}" if others else "none was launched here yet"
            raise StateError(f"cluster {self.path.name}: not found in {self.path.parent}; {known} (--name chooses)")
        return record

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the launcher's lock; raises `StateError` while another launcher has it."""
        self.create()
        with (self.path / "launch.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StateError(
                    f"cluster {self.path.name}: another launcher runs it; stop it with `pdcluster down --name "
                    f"{self.path.name}` or choose another --name"
                ) from error
            yield
