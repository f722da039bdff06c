"""A cluster's record seen against the processes that really run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdcluster import processes
from pdcluster.state import ClusterRecord, ProcessRecord, boot_id

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {"healthy": "green", "starting": "yellow", "restarting": "yellow", "failed": "red", "lost": "red"}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A record and what is true of it now. `phase` is the record's, or "lost" if its launcher died."""

    record: ClusterRecord
    phase: str
    running: frozenset[str]

    @property
    def ready(self) -> bool:
        """Tell whether the launcher runs and every process is healthy."""
        healthy = all(item.phase == "healthy" and item.name in self.running for item in self.record.processes.values())
        return self.phase == "ready" and healthy

    def table(self) -> Table:
        """Return a table for a terminal."""
        from rich.table import Table  # noqa: PLC0415 - only for people

        table = Table("process", "phase", "pid", "restarts", "url")
        table.title = f"{self.record.name}: {self.phase}, {self.record.model} at {self.record.url}"
        for item in self.record.processes.values():
            phase = self.process_phase(item)
            colour = _COLOURS.get(phase, "dim")
            table.add_row(item.name, f"[{colour}]{phase}[/]", str(item.pid or ""), str(item.restarts), item.url)
        for prefill, decode in self.record.excluded_pairs:
            table.add_row(f"{prefill} -> {decode}", "[red]excluded[/]", "", "", "")
        return table

    def process_phase(self, item: ProcessRecord) -> str:
        """Return the recorded phase, "lost" where the record says it runs and it doesn't."""
        if item.pid is not None and item.phase != "stopped" and item.name not in self.running:
            return "lost"
        return item.phase


def look(record: ClusterRecord) -> ClusterView:
    """Compare a record with the processes of this machine."""
    same_boot = record.boot_id == boot_id()
    running = frozenset(
        item.name for item in record.processes.values() if same_boot and processes.is_running(item.pid, item.started)
    )
    launcher = same_boot and processes.is_running(record.launcher_pid, record.launcher_started)
    over = record.phase in ("stopped", "failed")
    return ClusterView(record, record.phase if launcher or over else "lost", running)


def sessions_of(record: ClusterRecord) -> list[processes.Session]:
    """Return the sessions of everything that the record says was started."""
    return [
        processes.Session(item.pid, item.started)
        for item in record.processes.values()
        if item.pid is not None and item.started is not None
    ]
