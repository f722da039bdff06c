"""`status`, `logs` and `down`: look at a cluster and end it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pdcluster.commands import options

if TYPE_CHECKING:
    from pdcluster.state import ClusterRecord, RunDirectory

_POLL_S = 0.5


def status(name: options.Name = None, as_json: options.Json = False) -> None:
    """Show a cluster's processes: phase, process id, restarts, where they answer.

    Exit code 0 while it is ready, 1 while it is not (starting, degraded, stopped or failed).
    """
    from pdcluster.cluster_view import look

    view = look(_directory(name).must_read())
    if as_json:
        record = asdict(view.record)
        record["plan"] = None
        typer.echo(json.dumps({**record, "phase": view.phase, "ready": view.ready}, indent=2))
    else:
        from rich.console import Console

        Console().print(view.table())
        if view.record.message:
            typer.echo(view.record.message)
    raise typer.Exit(0 if view.ready else 1)


def logs(
    process: Annotated[str | None, typer.Argument(help="e.g. prefill-0, decode-1, proxy; default: all.")] = None,
    name: options.Name = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing as lines come.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines from the end.")] = 50,
) -> None:
    """Print the logs of a cluster's processes."""
    from pdcluster.errors import StateError
    from pdcluster.log_follow import follow as follow_logs
    from pdcluster.log_follow import tail

    directory = _directory(name)
    directory.must_read()
    names = sorted(path.stem for path in directory.logs.glob("*.log"))
    if process is not None and process not in names:
        raise StateError(f"no log of {process} in {directory.logs}; there are: {', '.join(names) or 'none'}")
    chosen = [process] if process else names
    ends = {}
    for item in chosen:
        prefix = "" if process else f"{item} | "
        last, ends[item] = tail(directory.log(item), lines)
        for line in last:
            typer.echo(prefix + line)
    if follow:
        follow_logs({item: directory.log(item) for item in chosen}, ends, typer.echo, prefixed=process is None)


def down(
    name: options.Name = None,
    grace: Annotated[
        float | None, typer.Option("--grace", min=0, help="Seconds for streams to end.", show_default="as launched")
    ] = None,
) -> None:
    """Stop a cluster: running streams may end first; nothing of it is left, also after a crash of its launcher."""
    directory = _directory(name)
    record = directory.must_read()
    killed = stop_cluster(directory, record, grace)
    typer.echo(f"cluster {record.name}: stopped" + (f" ({killed} processes had to be killed)" if killed else ""))


def stop_cluster(directory: RunDirectory, record: ClusterRecord, grace: float | None) -> int:
    """End the launcher in order if it runs, then whatever is left of the cluster; returns how many were killed."""
    from pdcluster import processes
    from pdcluster.cluster_view import sessions_of

    launcher = processes.Session(record.launcher_pid, record.launcher_started)
    same_boot = record.boot_id == _boot_id()
    if same_boot and processes.is_running(launcher.leader, launcher.started):
        processes.terminate([launcher])
        options.say(f"cluster {record.name}: stopping")
        longest = 90.0 if grace is None else grace
        deadline = time.monotonic() + longest
        while processes.is_running(launcher.leader, launcher.started) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 5)
        if processes.is_running(launcher.leader, launcher.started):
            processes.kill_one(launcher)
    killed = processes.end(sessions_of(record), 10.0 if grace is None else grace) if same_boot else 0
    current = directory.read() or record
    if current.phase not in ("stopped", "failed"):
        from dataclasses import replace

        directory.write(replace(current, phase="stopped"))
    return killed


def _directory(name: str | None) -> RunDirectory:
    from pdcluster.state import RunDirectory, default_home

    return RunDirectory.of(default_home(os.environ), name or "default")


def _boot_id() -> str:
    from pdcluster.state import boot_id

    return boot_id()
