import os
import signal
import threading

import httpx
import pytest

from pdcluster import supervisor as supervisor_module
from pdcluster import tracking
from pdcluster.backends.base import Handle
from pdcluster.errors import LaunchError
from pdcluster.inventory import Inventory
from pdcluster.model_facts import Checkpoint
from pdcluster.pair_check import PairResult
from pdcluster.plan import make_plan
from pdcluster.spec_loading import load_spec, parse_set_flags
from pdcluster.state import ClusterRecord, RunDirectory
from pdcluster.supervisor import Supervisor


class FakeBackend:
    """Programs that run until told otherwise; `events` is what happened, in order."""

    def __init__(self):
        self.events = []
        self.codes = {}
        self.names = {}
        self.changed = threading.Condition()

    def start(self, program):
        with self.changed:
            handle = Handle(program.name, 1000 + len(self.names), 1.0)
            self.names[handle.pid] = program.name
            self.codes[handle.pid] = None
            self.events.append(("start", program.name))
            self.changed.notify_all()
            return handle

    def poll(self, handle):
        return self.codes[handle.pid]

    def terminate(self, handles):
        for handle in handles:
            self.events.append(("terminate", handle.name))
            self.codes[handle.pid] = 0

    def kill(self, handles):
        for handle in handles:
            self.events.append(("kill", handle.name))
            if self.codes[handle.pid] is None:
                self.codes[handle.pid] = -9

    def logs(self, name, lines):
        return ["loading", f"{name}: operator torchvision::nms does not exist"]

    def die(self, name, code=1):
        with self.changed:
            pid = max(pid for pid, known in self.names.items() if known == name)
            self.codes[pid] = code

    def count(self, name):
        return self.events.count(("start", name))

    def alive(self):
        return [self.names[pid] for pid, code in self.codes.items() if code is None]


class Reports:
    def __init__(self):
        self.notes = []
        self.phases = []
        self.changed = threading.Condition()

    def update(self, record):
        with self.changed:
            if not self.phases or self.phases[-1] != record.phase:
                self.phases.append(record.phase)
            self.record = record
            self.changed.notify_all()

    def note(self, text):
        with self.changed:
            self.notes.append(text)
            self.changed.notify_all()

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), timeout=20), (self.phases, self.notes)


class FakeWarmUp:
    def __init__(self):
        self.bad = set()
        self.checked = []

    def check(self, rounds):
        pairs = [(prefill.name, decode.name) for pairs in rounds for prefill, decode in pairs]
        self.checked.append(pairs)
        return [
            PairResult(
                p, d, ok=(p, d) not in self.bad, detail="token 0 differs" if (p, d) in self.bad else "equal", kv_bytes=5
            )
            for p, d in pairs
        ]


class Rig:
    def __init__(self, tmp_path, *assignments):
        self.backend, self.reports, self.warm_up = FakeBackend(), Reports(), FakeWarmUp()
        self.healthy = True
        self.asked = set()
        loaded = load_spec(None, parse_set_flags(["pools.prefill.replicas=2", "launch.stop_grace=1", *assignments]))
        inventory = Inventory("cpu", cores={0: (0, 1)}, memory_bytes=10**12, available_bytes=10**12)
        plan = make_plan(loaded, inventory, Checkpoint("/m", local=True, facts=None), "python")
        self.directory = RunDirectory.of(tmp_path, "default")
        self.directory.create()
        record = ClusterRecord("default", "r", "starting", os.getpid(), 1.0, "b", plan.proxy.url, "m")
        client = httpx.Client(transport=httpx.MockTransport(self.answer))
        self.supervisor = Supervisor(
            loaded, plan, record, self.directory, self.backend, self.warm_up, client, self.reports
        )

    def answer(self, request):
        self.asked.add(str(request.url))
        return httpx.Response(200 if self.healthy else 503)

    def run(self, *steps, stop=True):
        """Run to the end; each step waits for a condition, then acts; a stop is asked for last."""
        failures = []

        def drive():
            try:
                for condition, action in steps:
                    self.reports.wait(condition)
                    action()
            except AssertionError as error:
                failures.append(error)
            if stop:
                os.kill(os.getpid(), signal.SIGTERM)

        driver = threading.Thread(target=drive)
        driver.start()
        try:
            self.supervisor.run()
        finally:
            driver.join(timeout=30)
        if failures:
            raise failures[0]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_TICK_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(tracking, "_LONGEST_BACKOFF_S", 0.02)


def ready(reports):
    return reports.phases[-1:] == ["ready"]


def nothing():
    pass


def test_a_launch_goes_through_its_phases_and_stops_the_proxy_before_the_engines(tmp_path):
    rig = Rig(tmp_path)
    rig.run((ready, nothing))
    assert rig.reports.phases == ["starting", "warming", "ready", "stopping", "stopped"]
    ends = [name for kind, name in rig.backend.events if kind == "terminate"]
    assert ends == ["proxy", "prefill-0", "prefill-1", "decode-0"]
    assert rig.backend.alive() == []
    assert rig.directory.read().phase == "stopped"


def test_every_pair_is_checked_before_the_proxy_starts(tmp_path):
    rig = Rig(tmp_path)
    rig.run((ready, nothing))
    assert sorted(rig.warm_up.checked[0]) == [("prefill-0", "decode-0"), ("prefill-1", "decode-0")]
    assert rig.backend.events.index(("start", "proxy")) == 3


@pytest.mark.parametrize(
    ("client_ca", "url"), [([], "https://127.0.0.1:8000"), (["proxy.tls_client_ca=/a"], "http://127.0.0.1:9100")]
)
def test_a_proxy_with_tls_is_asked_where_the_launcher_can_ask(tmp_path, client_ca, url):
    rig = Rig(tmp_path, "proxy.tls_certificate=/c", "proxy.tls_key=/k", "proxy.admin_port=9100", *client_ca)
    rig.run((ready, nothing))
    assert {asked for asked in rig.asked if ":181" not in asked} == {url + "/ready"}
    assert rig.directory.read().url == "https://127.0.0.1:8000"


def test_a_pair_that_diverges_is_kept_out_of_service_and_said_so(tmp_path):
    rig = Rig(tmp_path)
    rig.warm_up.bad = {("prefill-1", "decode-0")}
    rig.run((ready, nothing))
    assert rig.reports.record.excluded_pairs == (("prefill-1", "decode-0"),)
    assert "--exclude-pair" in rig.supervisor._proxy.program.argv
    assert any("prefill-1 -> decode-0 is not put in service" in note for note in rig.reports.notes)


def test_a_launch_without_a_working_pair_fails_and_leaves_nothing(tmp_path):
    rig = Rig(tmp_path)
    rig.warm_up.bad = {("prefill-0", "decode-0"), ("prefill-1", "decode-0")}
    with pytest.raises(LaunchError, match="no prefill x decode pair works: token 0 differs"):
        rig.run(stop=False)
    assert rig.backend.alive() == []
    assert rig.directory.read().phase == "failed"


def test_an_early_death_names_the_engine_the_cause_and_its_log_and_stops_the_rest(tmp_path):
    rig = Rig(tmp_path)
    rig.healthy = False

    def started(_):
        return rig.backend.count("decode-0") == 1  # the last to start

    with pytest.raises(LaunchError) as caught:
        rig.run((started, lambda: rig.backend.die("prefill-1", 1)), stop=False)
    text = str(caught.value)
    assert text.startswith("prefill-1 ended before it was ready: exit code 1")
    assert "pip uninstall -y torchvision" in text
    assert "prefill-1.log" in text
    assert rig.backend.alive() == []


def test_engines_that_never_become_healthy_are_given_up_by_name(tmp_path):
    rig = Rig(tmp_path, "launch.ready_timeout=0.05")
    rig.healthy = False
    with pytest.raises(LaunchError, match=r"prefill-0, prefill-1, decode-0: not healthy after 0\.05 s"):
        rig.run(stop=False)
    assert rig.backend.alive() == []


def test_ctrl_c_while_engines_load_stops_everything(tmp_path):
    rig = Rig(tmp_path)
    rig.healthy = False
    rig.run((lambda _: rig.backend.count("decode-0") == 1, nothing))
    assert rig.reports.phases[-1] == "stopped"
    assert rig.backend.alive() == []


def test_an_engine_that_dies_comes_back_after_a_check_of_its_pairs(tmp_path):
    rig = Rig(tmp_path)
    rig.run(
        (ready, lambda: rig.backend.die("prefill-0", -9)),
        (lambda reports: any("back in service" in note for note in reports.notes), nothing),
    )
    assert rig.backend.count("prefill-0") == 2
    assert rig.warm_up.checked[-1] == [("prefill-0", "decode-0")]
    assert any("killed by SIGKILL" in note for note in rig.reports.notes)


def test_an_engine_that_comes_back_wrong_is_not_put_in_service(tmp_path):
    rig = Rig(tmp_path, "launch.restart_limit=2")

    def spoil():
        rig.warm_up.bad = {("prefill-0", "decode-0")}
        rig.backend.die("prefill-0")

    rig.run((ready, spoil), (lambda reports: reports.record.processes["prefill-0"].phase == "failed", nothing))
    assert any(
        "prefill-0 came back but prefill-0 -> decode-0: token 0 differs; stopped" in note for note in rig.reports.notes
    )


def test_an_engine_that_keeps_dying_stays_down_after_the_limit(tmp_path):
    rig = Rig(tmp_path, "launch.restart_limit=1")
    rig.run(
        (ready, lambda: rig.backend.die("decode-0")),
        (lambda _: rig.backend.count("decode-0") == 2, lambda: rig.backend.die("decode-0")),
        (lambda reports: reports.record.processes["decode-0"].phase == "failed", nothing),
    )
    assert rig.backend.count("decode-0") == 2


def test_a_proxy_that_dies_is_started_again(tmp_path):
    rig = Rig(tmp_path)
    rig.run((ready, lambda: rig.backend.die("proxy")), (lambda _: rig.backend.count("proxy") == 2, nothing))


def test_a_second_signal_kills_at_once(tmp_path):
    rig = Rig(tmp_path, "launch.stop_grace=600")
    original = rig.backend.terminate

    def stubborn(handles):
        original([])
        os.kill(os.getpid(), signal.SIGINT)

    rig.backend.terminate = stubborn
    rig.run((ready, nothing))
    assert any("second signal" in note for note in rig.reports.notes)
    assert rig.backend.alive() == []
