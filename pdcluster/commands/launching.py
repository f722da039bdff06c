"""`launch`: start a cluster and keep it running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from pdcluster.commands import options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import httpx

    from pdcluster.preflight import Prepared
    from pdcluster.state import ClusterRecord, RunDirectory

_POLL_S = 0.3


@options.takes_spec
def launch(
    loaded: options.Loaded,
    *,
    fit_memory: options.FitMemory = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once ready; `down` stops it.")] = False,
    as_json: options.Json = False,
) -> None:
    """Start prefill and decode pools and the endpoint in front of them; runs until Ctrl-C."""
    from pdcluster.preflight import check_ready_to_start, prepare_plan, refuse_missing_packages
    from pdcluster.state import RunDirectory, default_home

    directory = RunDirectory.of(default_home(os.environ), loaded.spec.name)
    if detach:
        _detach(directory)
        return
    with directory.lock():
        _reap_left_over(directory)
        refuse_missing_packages()
        prepared = prepare_plan(loaded, os.environ, options.say, build=True, fit_memory=fit_memory)
        check_ready_to_start(prepared, os.environ, options.say)
        for note in prepared.plan.notes:
            options.say(f"note: {note}")
        _run(prepared, directory, as_json=as_json)


def _run(prepared: Prepared, directory: RunDirectory, *, as_json: bool) -> None:
    import uuid

    from pdcluster.backends import BACKENDS
    from pdcluster.engine_args import SCRUBBED, SCRUBBED_PREFIXES
    from pdcluster.pair_check import PairChecker
    from pdcluster.reporting import choose_reporter
    from pdcluster.supervisor import Supervisor
    from pdcluster.warmup import WarmUp

    for variable in sorted(os.environ):
        if variable in SCRUBBED or variable.startswith(SCRUBBED_PREFIXES):
            options.say(f"note: {variable} is not passed on to engines: it {SCRUBBED.get(variable, 'breaks them')}")
    for old in directory.logs.glob("*.log"):
        if old.name != "launcher.log":
            old.unlink()
    spec, plan = prepared.loaded.spec, prepared.plan
    on_cpu = prepared.inventory.kind == "cpu"
    tolerance = spec.launch.parity_tolerance or (1e-4 if on_cpu and not spec.pools.decode.dtype else 0.05)
    with _client(prepared, os.environ) as client, choose_reporter(as_json=as_json) as reporter:
        checker = PairChecker(client, plan.served_model_name, tolerance, lambda: uuid.uuid4().hex)
        Supervisor(
            loaded=prepared.loaded,
            plan=plan,
            record=_first_record(prepared),
            directory=directory,
            backend=BACKENDS["local"](directory, os.environ),
            warm_up=WarmUp(checker, workers=1 if on_cpu else 8, enforce=spec.launch.parity),
            client=client,
            reporter=reporter,
        ).run()


def _client(prepared: Prepared, environment: Mapping[str, str]) -> httpx.Client:
    """Return the launcher's HTTP client, which shows engines their key and the proxy nothing.

    Engines speak HTTP. HTTPS is the health of our own endpoint alone, asked with no secret and read for its status,
    under a certificate that names another host and may be renewed while the launcher runs: it isn't verified. Engines
    answer on addresses of this host or its network: a proxy set in the environment is not for them.
    """
    import httpx

    from pdcluster.engine_key import EngineAuth

    auth = EngineAuth(environment, [instance.url for instance in prepared.plan.instances])
    return httpx.Client(timeout=2.0, trust_env=False, auth=auth, verify=not prepared.loaded.spec.proxy.tls)


def _first_record(prepared: Prepared) -> ClusterRecord:
    import uuid

    from pdcluster.processes import start_time
    from pdcluster.state import ClusterRecord, boot_id

    return ClusterRecord(
        name=prepared.plan.name,
        run_id=uuid.uuid4().hex,
        phase="starting",
        launcher_pid=os.getpid(),
        launcher_started=start_time(os.getpid()) or 0.0,
        boot_id=boot_id(),
        url=prepared.plan.proxy.url,
        model=prepared.plan.served_model_name,
        plan=prepared.plan.to_json(),
    )


def _reap_left_over(directory: RunDirectory) -> None:
    """End what a launcher that was killed has left; the lock says that it isn't there any more."""
    from pdcluster import processes
    from pdcluster.cluster_view import sessions_of
    from pdcluster.state import boot_id

    record = directory.read()
    if record is not None and record.boot_id == boot_id():
        killed = len(processes.members(sessions_of(record)))
        if killed:
            options.say(f"cluster {record.name}: ending {killed} processes that an earlier launcher left")
            processes.end(sessions_of(record), 10.0)


def _detach(directory: RunDirectory) -> None:
    """Run the same command in a session of its own, show its log until it is ready, and return."""
    from pdcluster import processes
    from pdcluster.errors import LaunchError

    with directory.lock():  # another launcher is refused here and now
        log = directory.log("launcher")
        log.write_bytes(b"")
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--detach", "-d")]
    with log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "pdcluster", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    shown = 0
    try:
        while True:
            code = child.poll()
            shown = _show_new(log, shown)
            record = directory.read()
            if code is not None:
                raise typer.Exit(code) if code else LaunchError("the launcher ended before it was ready")
            if record is not None and record.launcher_pid == child.pid and record.phase == "ready":
                _show_new(log, shown)
                return
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        options.say("stopping the launch")
        processes.terminate([processes.Session(child.pid, processes.start_time(child.pid) or 0.0)])
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=120)
        raise


def _show_new(log: Path, offset: int) -> int:
    with log.open("rb") as file:
        file.seek(offset)
        data = file.read()
    sys.stderr.write(data.decode("utf-8", errors="replace"))
    sys.stderr.flush()
    return offset + len(data)
