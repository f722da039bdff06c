"""`pdcluster simulate` as a user meets it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from pdcluster.cli import app
from pdcluster.errors import UserError

ROOT = Path(__file__).parents[3]
ARGV = [sys.executable, "-m", "pdcluster", "simulate"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * index, "input_length": 1000, "output_length": 20, "hash_ids": [index % 5, 10 + index]}
        for index in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulate(*arguments, cwd=None):
    return subprocess.run(
        [*ARGV, *map(str, arguments)], capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=cwd
    )


def test_a_trace_in_virtual_time_is_told_to_machines_with_its_conditions(trace):
    done = simulate("--virtual", "--trace", trace, "--prefill", 2, "--decode", 1, "--router", "least_work", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["requests"], told["answered"], told["in_target"]) == (40, 40, 1.0)
    assert 0.2 < told["cached_share"] < 0.6
    assert told["ttft"]["p50"] > 0.0
    conditions = told["conditions"]
    assert (conditions["prefill"], conditions["decode"], conditions["router"]) == (2, 1, "least_work")
    assert conditions["profile"]["prefill_tokens_per_s"] == 40_000
    assert "40 requests in 4 s to 2 + 1 engines" in done.stderr


def test_a_trace_in_virtual_time_is_told_to_people(trace):
    done = simulate("--virtual", "--trace", trace, "--slow", "decode-0=9", "--decode", 1, "--copies", 2)
    assert done.returncode == 0, done.stderr
    for words in ("first token", "each token after it", "in target:", "of 80 requests", "conditions: {"):
        assert words in done.stdout


def test_a_router_of_the_users_own_is_found_where_they_stand(trace, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from pdcluster.simulation.push import RoundRobin\n"
        "class Refuser(RoundRobin):\n"
        "    def arrive(self, now, request):\n"
        "        return [('refuse', request.number)]\n"
    )
    done = simulate("--virtual", "--trace", trace, "--router", "mine:Refuser", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["not_answered"] == {"refused": 40}


def test_mistakes_are_told_with_what_to_do(trace, tmp_path):
    def refused(mistake, *words):
        done = CliRunner().invoke(app, ["simulate", *map(str, mistake)])
        assert isinstance(done.exception, UserError)
        for word in words:
            assert word in str(done.exception)

    refused(("--virtual",), "needs a --trace")
    refused(("--trace", trace), "--trace: goes with --virtual", "bench replay")
    refused(("--virtual", "--trace", tmp_path / "none.jsonl"), "none.jsonl: cannot be read as a trace")
    refused(("--virtual", "--trace", trace, "--from", 9, "--to", 8), "--to 8: must be later than --from 9")
    refused(("--virtual", "--trace", trace, "--router", "best"), "--router best: there is round_robin")
    refused(("--slow", "decode-9=2"), "--slow decode-9=2", "decode-0 to 7")
    refused(("--slow", "decode=2"), "--slow decode=2: must be such as decode-0=5")
    refused(("--profile", tmp_path / "none.json"), "none.json: cannot read the profile")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_engines_serve_until_they_are_told_to_stop(number):
    argv = [*ARGV, "--prefill", "1", "--decode", "2", "--port-base", "0", "--kv-events", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as running:
        try:
            urls = json.loads(running.stdout.readline())
            assert [len(urls[role]) for role in ("prefill", "decode")] == [1, 2]
            for url in (*urls["prefill"], *urls["decode"]):
                assert httpx.get(url + "/health").status_code == 200
            running.send_signal(number)
            _, said = running.communicate(timeout=20)
        finally:
            running.kill()
    assert (running.returncode, said) == (0, "")


def test_help_has_examples():
    done = simulate("--help")
    assert "Examples:" in done.stdout
    assert "pdcluster simulate --prefill 4 --decode 8 --port-base 9000" in done.stdout
