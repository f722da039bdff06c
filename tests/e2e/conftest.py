"""Real engines, started once and shared: a 2-prefill 2-decode cluster of the tiny model, and one aggregated engine.

Everything runs on loopback, in state directories of the tests' own, and is ended by process id.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from pdcluster import processes
from pdcluster.state import RunDirectory

START_LIMIT_S = 420

PARSER = "--enable-auto-tool-choice, --tool-call-parser, hermes"


class Cluster:
    """A launched cluster: its endpoint, its engines by name, and its command line."""

    def __init__(self, home, name, port):
        self.home, self.name, self.port = home, name, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=180, trust_env=False)

    def run(self, *arguments, limit=START_LIMIT_S):
        environment = {**os.environ, "PDCLUSTER_HOME": str(self.home)}
        command = [sys.executable, "-m", "pdcluster", *arguments, "--name", self.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)

    def launch(self, *arguments):
        began = time.monotonic()
        done = self.run("launch", "--port", str(self.port), "--detach", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        print(f"\n{self.name}: ready after {time.monotonic() - began:.0f} s\n{done.stderr}")

    @property
    def record(self):
        return RunDirectory.of(self.home, self.name).must_read()

    def engines(self, role=None):
        return {
            name: item.url
            for name, item in self.record.processes.items()
            if item.role != "proxy" and role in (None, item.role)
        }

    def processes(self):
        record = self.record
        sessions = [processes.Session(item.pid, item.started) for item in record.processes.values() if item.pid]
        return processes.members(sessions)

    def down(self):
        """Take it down, unless that was done."""
        if self.client.is_closed:
            return
        before = self.processes()
        done = self.run("down", limit=120)
        assert done.returncode == 0, done.stderr
        _, alive = psutil.wait_procs(before, timeout=5)
        assert not alive, alive
        self.client.close()


def metric(url, name, **labels):
    """Sum a metric of an engine or the proxy over all label sets that match."""
    total = 0.0
    for line in httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")) and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            total += float(line.rsplit(" ", 1)[1])
    return total


def eventually(condition, limit=20.0, every=0.1):
    """Poll a condition of another process until it holds; its last value is returned."""
    deadline = time.monotonic() + limit
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(every)  # polling another process, bounded
    return value


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def aggregated_engine(model, directory):
    """Run one engine of the plan's kind without KV transfer: the truth that clusters are compared with."""
    port = free_port()
    plan = subprocess.run(
        [sys.executable, "-m", "pdcluster", "plan", "--model", model, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    instance = next(item for item in json.loads(plan.stdout)["instances"] if item["role"] == "decode")
    argv = instance["argv"]
    at = argv.index("--kv-transfer-config")
    argv = argv[:at] + argv[at + 2 :]
    argv[argv.index("--port") + 1] = str(port)
    environment = {**os.environ, **instance["environment"]}
    with (directory / "aggregated.log").open("wb") as log:
        process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
    session = processes.Session(process.pid, processes.start_time(process.pid))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        processes.end([session], grace=20)
        process.wait(timeout=10)


def wait_healthy(url):
    def healthy():
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200

    assert eventually(healthy, START_LIMIT_S), f"{url} is not healthy"


@pytest.fixture(scope="session", autouse=True)
def models():
    """Make the models before anything is timed."""
    from pdcluster.models.catalog import prepare

    return {name: prepare(name) for name in ("tiny", "tiny-mla")}


@pytest.fixture(scope="session")
def aggregated(tmp_path_factory, models):
    """The aggregated tiny engine; it loads while the cluster does."""
    with aggregated_engine("tiny", tmp_path_factory.mktemp("aggregated")) as url:
        yield url


@pytest.fixture(scope="session")
def two_by_two(tmp_path_factory, aggregated):
    """Two prefill and two decode engines for several modules, the last of which takes them down.

    They parse tool calls: vLLM 0.32 refuses every tool choice but "none" without a parser. Prefill engines publish KV
    events, say how many tokens were cached, and have so little KV memory that blocks are evicted.
    """
    settings = {
        "pools.decode.extra_args": f"[{PARSER}]",
        "pools.prefill.extra_args": f"[{PARSER}, --enable-prompt-tokens-details]",
        "pools.prefill.kv_events": "true",
        "pools.prefill.kv_cache_memory_bytes": "80000000",
    }
    assignments = [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]
    cluster = Cluster(tmp_path_factory.mktemp("home"), "e2e", free_port())
    try:
        cluster.launch("--prefill", "2", "--decode", "2", "--model", "tiny", *assignments)
        wait_healthy(aggregated)
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def new_cluster(tmp_path_factory):
    """Launch clusters and take them down again at the end of the module."""
    made = []

    def launch(name, *arguments):
        cluster = Cluster(tmp_path_factory.mktemp("home"), name, free_port())
        made.append(cluster)
        cluster.launch(*arguments)
        return cluster

    yield launch
    for cluster in made:
        cluster.down()
