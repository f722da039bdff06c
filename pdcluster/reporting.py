"""Show a launch to a person (a live table, or plain lines where there is no terminal) or to a machine (JSON lines)."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pdcluster.state import ClusterRecord

_HEARTBEAT_S = 15.0
_HEADLINE = {
    "starting": "loading engines",
    "warming": "checking prefill x decode pairs",
    "ready": "ready",
    "stopping": "stopping",
}


class TerminalReporter:
    """A table that is redrawn while engines start; notes stay above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._record: ClusterRecord | None = None
        self._live = Live(console=console, refresh_per_second=2, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        """Start drawing."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        self._live.stop()

    def update(self, record: ClusterRecord) -> None:
        """Show the state; once ready, the table is taken away and one line stays."""
        was = self._record.phase if self._record else None
        self._record = record
        if record.phase == "ready" and was != "ready":
            self._live.stop()
            self._console.print(ready_line(record), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print one line above the table."""
        self._console.print(text, soft_wrap=True, markup=False)

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        if self._record is None:
            return table
        headline = _HEADLINE.get(self._record.phase, self._record.phase)
        table.add_row(f"[bold]{headline}[/] {time.monotonic() - self._began:.0f} s")
        for item in self._record.processes.values():
            mark = "[green]healthy[/]" if item.phase == "healthy" else f"[yellow]{item.phase}[/]"
            table.add_row(f"  {item.name}", mark if item.pid else "[dim]waiting[/]", item.url)
        return table


class LineReporter:
    """Plain lines on the error stream: each change once, and a heartbeat so that nobody thinks it hangs."""

    def __init__(self) -> None:
        self._began = self._spoke = time.monotonic()
        self._phases: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Do nothing; a context manager like the other."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def update(self, record: ClusterRecord) -> None:
        """Print what changed."""
        items = {item.name: item.phase for item in record.processes.values() if item.pid is not None}
        if record.phase != self._phases.get(""):
            self.note(ready_line(record) if record.phase == "ready" else _HEADLINE.get(record.phase, record.phase))
        for name, phase in items.items():
            if phase == "healthy" and self._phases.get(name) != "healthy":
                self.note(f"{name} is healthy")
        self._phases = {**items, "": record.phase}
        if record.phase != "ready" and time.monotonic() - self._spoke > _HEARTBEAT_S:
            healthy = sum(phase == "healthy" for phase in items.values())
            self.note(f"{_HEADLINE.get(record.phase, record.phase)}: {healthy} of {len(items)} processes healthy")

    def note(self, text: str) -> None:
        """Print one line with the seconds since the start."""
        self._spoke = time.monotonic()
        print(f"[{self._spoke - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)


class JsonReporter:
    """One JSON object a line on the output: phases, process states and notes."""

    def __init__(self) -> None:
        self._last = ""

    def __enter__(self) -> Self:
        """Do nothing; a context manager like the others."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def update(self, record: ClusterRecord) -> None:
        """Print the state where it changed."""
        state = {
            "event": "state",
            "phase": record.phase,
            "url": record.url,
            "processes": {item.name: item.phase for item in record.processes.values()},
        }
        line = json.dumps(state)
        if line != self._last:
            self._last = line
            print(line, flush=True)

    def note(self, text: str) -> None:
        """Print a note."""
        print(json.dumps({"event": "note", "text": text}), flush=True)


def ready_line(record: ClusterRecord) -> str:
    """Return the one line that says where the cluster answers."""
    count = {role: sum(item.role == role for item in record.processes.values()) for role in ("prefill", "decode")}
    return (
        f"ready: {record.model} at {record.url}/v1 "
        f"({count['prefill']} prefill, {count['decode']} decode; stop with Ctrl-C or `pdcluster down`)"
    )


def choose_reporter(*, as_json: bool) -> TerminalReporter | LineReporter | JsonReporter:
    """Return the reporter that fits where the output goes."""
    if as_json:
        return JsonReporter()
    console = Console(stderr=True, highlight=False)
    return TerminalReporter(console) if console.is_terminal else LineReporter()
