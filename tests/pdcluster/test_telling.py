"""What people are told: deaths, progress, findings."""

import io
import json

import pytest
from rich.console import Console

from pdcluster import doctor
from pdcluster.diagnosis import describe_exit, explain_death
from pdcluster.reporting import JsonReporter, LineReporter, TerminalReporter
from pdcluster.state import ClusterRecord, ProcessRecord


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", "pip uninstall -y torchvision"),
        ("ModuleNotFoundError: No module named 'vllm'", "vLLM is not installed"),
        ("RuntimeError: NIXL is not available", "NIXL is not installed"),
        (
            "ValueError: ... is larger than the available KV cache memory (0.1 GiB)",
            "raise its memory or lower max_model_len",
        ),
        ("OSError: [Errno 98] Address already in use", "ports.base"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out of memory"),
        ("api_server.py: error: unrecognized arguments: --nope", "pdcluster check"),
    ],
)
def test_a_known_cause_is_named_with_what_to_do(line, advice):
    text = explain_death("decode-0", 1, ["start", line], "/logs/decode-0.log")
    assert text.startswith("decode-0 ended before it was ready: exit code 1\nlikely cause: ")
    assert advice in text
    assert "end of /logs/decode-0.log:" in text
    assert f"  | {line}" in text


def test_an_unknown_cause_shows_the_log_alone():
    text = explain_death("decode-0", 1, [f"line {index}" for index in range(100)], "p")
    assert "likely cause" not in text
    assert "line 99" in text
    assert "line 50" not in text
    assert "(empty)" in explain_death("decode-0", 1, [], "p")


def test_exits_are_told_in_words():
    assert describe_exit(2) == "exit code 2"
    assert "memory runs out" in describe_exit(-9)
    assert describe_exit(-15) == "killed by SIGTERM"
    assert describe_exit(-99) == "killed by 99"


def record(phase, **processes):
    made = ClusterRecord("c", "r", phase, 1, 1.0, "b", "http://127.0.0.1:8000", "tiny")
    for name, state in processes.items():
        made = made.with_process(ProcessRecord(name, name[:-1], "u", state, pid=1, started=1.0))
    return made


def test_plain_lines_tell_each_change_once(capsys):
    reporter = LineReporter()
    with reporter:
        for phase, states in (
            ("starting", ("starting", "starting")),
            ("starting", ("healthy", "starting")),
            ("ready", ("healthy", "healthy")),
        ):
            for _ in range(2):
                reporter.update(record(phase, prefill0=states[0], decode0=states[1]))
        reporter.note("a note")
    lines = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()]
    ready = "ready: tiny at http://127.0.0.1:8000/v1 (1 prefill, 1 decode; stop with Ctrl-C or `pdcluster down`)"
    assert lines == ["loading engines", "prefill0 is healthy", ready, "decode0 is healthy", "a note"]


def test_plain_lines_have_a_heartbeat(capsys, monkeypatch):
    monkeypatch.setattr("pdcluster.reporting._HEARTBEAT_S", -1.0)
    reporter = LineReporter()
    reporter.update(record("starting", prefill0="healthy", decode0="starting"))
    assert "loading engines: 1 of 2 processes healthy" in capsys.readouterr().err


def test_json_lines_are_objects_and_come_only_with_changes(capsys):
    reporter = JsonReporter()
    for _ in range(3):
        reporter.update(record("starting", prefill0="healthy"))
    reporter.note("text")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["state", "note"]
    assert events[0]["processes"] == {"prefill0": "healthy"}


def test_a_terminal_keeps_the_ready_line():
    output = io.StringIO()
    with TerminalReporter(Console(file=output, force_terminal=True, width=120, highlight=False)) as reporter:
        reporter.update(record("starting", prefill0="starting"))
        reporter.update(record("ready", prefill0="healthy"))
        reporter.note("engine [x] is back")
    assert "ready: tiny at" in output.getvalue()
    assert "engine [x] is back" in output.getvalue()


@pytest.fixture
def examined(monkeypatch):
    def examine(version="0.32.0", import_error="", environment=None):
        monkeypatch.setattr(doctor, "vllm_version", lambda: version)
        monkeypatch.setattr(doctor, "_import_error", lambda _module, _environment: import_error)
        return {finding.subject: finding for finding in doctor.examine(environment or {})}

    return examine


def test_doctor_finds_what_is_missing_or_broken_and_says_how_to_mend_it(examined):
    assert examined(version=None)["vllm"].level == "fail"
    assert "pdcluster[cpu]" in examined(version=None)["vllm"].advice
    broken = examined(import_error="RuntimeError: operator torchvision::nms does not exist")["vllm"]
    assert (broken.level, broken.advice.split(" ")[:3]) == ("fail", ["pip", "uninstall", "-y"])


def test_doctor_warns_of_inherited_variables_that_engines_will_not_see(examined):
    findings = examined(
        environment={"VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_DP_RANK": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    )
    assert findings["VLLM_PORT"].level == findings["VLLM_DP_RANK"].level == "warn"
    assert "VLLM_LOGGING_LEVEL" not in findings


def test_doctor_looks_at_everything_and_names_no_failure_without_advice(examined):
    findings = examined()
    assert {"python", "vllm", "nixl", "devices", "cores", "memory", "open files"} <= findings.keys()
    assert all(finding.advice for finding in findings.values() if finding.level == "fail")
