"""`pdcluster bench scheduling` from the command line: runs, ends what it started, and says what cannot be."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from pdcluster.bench.routers import Ports, free_ports
from pdcluster.bench.simulated import Slow, parse_slow, start_engines
from pdcluster.commands import benchmarking
from pdcluster.errors import LaunchError, UserError
from tests.pdcluster.replay.test_trace import row, written

ENGINES = Path(__file__).with_name("engines.py")
ROOT = Path(__file__).parents[3]


def started(*arguments):
    argv = [sys.executable, "-m", "pdcluster", "bench", "scheduling", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    out, error = process.communicate(timeout=100)
    return process.returncode, out, error


@pytest.fixture
def trace(tmp_path):
    return written(tmp_path, *(row(at * 100, tokens=600, output=3) for at in range(20)))


COMMON = ("--prefill", 2, "--decode", 2, "--from", 0, "--to", 2, "--peers", "none")


def test_a_short_comparison_prints_rows_limits_and_conditions_and_keeps_them(tmp_path, trace):
    out = tmp_path / "found.json"
    code, told, error = ended(
        started(
            *(trace, "--engines", ENGINES, *COMMON, "--speeds", "4", "--seeds", "7", "--slow", "decode:5", "--json"),
            *("--find-limit", "--limit-from", 4, "--limit-to", 4, "--out", out, "--ttft-ms", 5000, "--tpot-ms", 1000),
        )
    )
    assert code == 0, error
    made = json.loads(told)
    (shown,) = made["rows"]
    assert (shown["contestant"], shown["in_target"], shown["failures"], shown["cached_share"]) == (
        "pdcluster",
        1,
        0,
        0.25,
    )
    assert made["limits"][0]["limit"]["speed"] == 4
    assert made["slow"][0]["slow"] == "decode:5"
    assert len(made["trials"]) == 2  # the limit is where the grid was: nothing ran twice
    assert sum(made["trials"][0]["served"]["decode"]) == 21  # one request to warm up
    assert made["trials"][0]["conditions"]["cache_state"].startswith("empty")
    assert json.loads(out.read_text())["rows"] == made["rows"]
    assert "1 of 2 and the search" in error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_whatever_was_started_ends_with_it(trace, number, code):
    process = started(trace, "--engines", ENGINES, *COMMON, "--speeds", "0.01", "--seeds", "1")
    own = psutil.Process(process.pid)
    children = []
    while len(children) < 2 or not [item for item in children if item.net_connections()]:
        assert process.poll() is None, ended(process)
        children = own.children(recursive=True)
    process.send_signal(number)
    told = ended(process)
    assert (told[0], "Traceback" in told[2]) == (code, False), told
    assert psutil.wait_procs(children, timeout=5)[1] == []


@pytest.mark.parametrize("seconds", [0.0, 0.6])
def test_an_interrupt_at_any_moment_of_a_start_leaves_nobody(trace, seconds):
    process = started(trace, "--engines", ENGINES, *COMMON, "--speeds", "0.01", "--seeds", "1")
    own, seen = psutil.Process(process.pid), {}
    while not seen:
        seen = {child.pid: child for child in own.children(recursive=True)}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        seen |= {child.pid: child for child in own.children(recursive=True)}
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert psutil.wait_procs(seen.values(), timeout=5)[1] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--speeds", "fast"), "--speeds fast: must be values with commas between them"),
        (("--speeds", "-1"), "--speeds -1: must be values"),
        (("--seeds", "1.5"), "--seeds 1.5: must be values"),
        (("--slow", "decode"), "--slow decode: must be prefill:FACTOR or decode:FACTOR"),
        (("--engines", "/nowhere/engines.py"), "/nowhere/engines.py: these engines did not come up"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(trace, arguments, told):
    argv = ["scheduling", str(trace), "--engines", str(ENGINES), *map(str, COMMON), *arguments]
    error = CliRunner().invoke(benchmarking.bench, argv).exception
    assert isinstance(error, UserError)  # the command line makes it one line and exit code 2
    assert str(error).startswith(told)


@pytest.mark.parametrize("text", ["decode:1", "decode:x", "both:5", "decode:nan", ":5"])
def test_slow_engines_need_a_role_and_a_factor(text):
    with pytest.raises(UserError, match="--slow"):
        parse_slow(text)
    assert parse_slow("prefill:2.5") == Slow("prefill", 2.5)


async def test_engines_say_what_each_served_and_that_they_are_gone(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    numbers = free_ports(3)
    engines = await asyncio.to_thread(start_engines, ENGINES, Ports(tuple(numbers[:1]), tuple(numbers[1:]), 0))
    served = await asyncio.to_thread(engines.served)
    assert (served.prefill, served.decode, served.cached_share) == ((0,), (0, 0), 0.25)
    assert engines.cpu_seconds() > 0
    engines.process.kill()
    engines.process.wait()
    with pytest.raises(LaunchError, match="did not say what they served"):
        engines.served()
    engines.stop()
