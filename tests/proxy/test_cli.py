import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys

import pytest

from tests.proxy.running import Running
from tests.stand_in.engine import Fault

GOOD = ("--prefill", "p=http://127.0.0.1:1", "--decode", "d=http://127.0.0.1:2")


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "proxy", *arguments], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prefill", "http://h:1"), "at least one decode engine"),
        (("--decode", "h:1"), "--decode h:1: not a URL"),
        (("--decode", "http://h:99999"), "not a URL"),
        (("--decode", "http://h:1?x=1"), "not a URL"),
        (("--decode", "http://key@h:1"), "not a URL"),
        (("--decode", "http://h:1", "--decode", "http://h:1"), "two endpoints have this name"),
        (("--decode", "a=http://h:1", "--decode", "b=http://h:1/"), "two endpoints have this url"),
        ((*GOOD, "--exclude-pair", "p:x"), "must be PREFILL:DECODE of these names: prefill ['p'], decode ['d']"),
        ((*GOOD, "--fallback", "maybe"), "must be decode or none"),
        (("--decode", "http://h:1", "--fallback", "none"), "nothing could be served"),
        ((*GOOD, "--connector", "pigeon"), "unknown; there is: nixl"),
        ((*GOOD, "--log-level", "loud"), "must be debug"),
        ((*GOOD, "--kv-events", "x=auto"), "must be auto, or begin with NAME= of one of ['d', 'p']"),
        ((*GOOD, "--kv-events", "p="), "--kv-events p=: nothing is no address"),
        ((*GOOD, "--kv-events", "p=10.0.0.1:5557"), "give one such as tcp://10.0.0.1:5557"),
        ((*GOOD, "--kv-events", "p=tcp://h:5557,h:6557"), "h:6557 is no address"),
        ((*GOOD, "--host", "203.0.113.7"), "cannot listen on 203.0.113.7"),
        ((*GOOD, "--port", "0"), "--port"),
        ((*GOOD, "--api-key-file", "/nowhere"), "/nowhere: cannot be read"),
        ((*GOOD, "--requests-per-minute", "5"), "they are for each API key"),
        ((*GOOD, "--tls-key", "/nowhere"), "need --tls-certificate"),
        ((*GOOD, "--tls-certificate", "/nowhere"), "/nowhere: cannot be used"),
    ],
)
def test_a_users_mistake_is_one_clear_line_and_exit_code_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(*GOOD, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "address already in use; choose another port" in done.stderr


def test_help_has_examples_and_every_flag():
    text = run("--help").stdout
    for words in (
        "pdcluster proxy --prefill http",
        "--exclude-pair",
        "--max-body-mb",
        "--shutdown-grace",
        "--fallback",
        "--lease-seconds",
        "--total-timeout",
        "--workers",
        "--api-key-file",
        "--kv-events",
    ):
        assert words in text


STREAM = {"model": "m", "messages": [], "stream": True}


async def test_sigterm_lets_a_stream_end_and_exits_with_0():
    async with Running() as proxy:
        rest = asyncio.Event()
        proxy.decode.faults = [Fault(hold=rest, pause_after=3)]
        async with proxy.client.stream("POST", "/v1/chat/completions", json=STREAM) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            os.kill(proxy.process.pid, signal.SIGTERM)
            await proxy.refuses_connections()
            rest.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await proxy.exit_code() == 0


async def test_what_is_not_done_at_the_end_of_the_grace_is_told_so_in_order():
    async with Running("--shutdown-grace", "1") as proxy:
        proxy.decode.faults = [Fault(hold=asyncio.Event(), pause_after=3)]
        async with proxy.client.stream("POST", "/v1/chat/completions", json=STREAM) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            proxy.prefill.arrived.clear()
            proxy.prefill.faults = [Fault(hold=asyncio.Event())]
            waiting = asyncio.create_task(proxy.client.post("/v1/chat/completions", json={**STREAM, "stream": False}))
            await asyncio.wait_for(proxy.prefill.arrived.wait(), 5)
            os.kill(proxy.process.pid, signal.SIGTERM)
            told = [line async for line in lines if line][-1]
            assert "the router was stopped before the answer was complete" in json.loads(told[6:])["error"]["message"]
        unserved = await waiting
        assert (unserved.status_code, unserved.json()["error"]["code"]) == (503, "no_endpoint")
        assert await proxy.exit_code() == 0


async def test_a_second_signal_ends_the_proxy_at_once_and_closes_its_engines_connections():
    async with Running() as proxy:
        proxy.decode.faults = [Fault(hold=asyncio.Event(), pause_after=3)]
        async with proxy.client.stream("POST", "/v1/chat/completions", json=STREAM) as reply:
            await anext(reply.aiter_lines())
            os.kill(proxy.process.pid, signal.SIGTERM)
            await proxy.refuses_connections()
            os.kill(proxy.process.pid, signal.SIGINT)
            await proxy.exit_code()
            await asyncio.wait_for(proxy.decode.gone.wait(), 5)


def test_the_proxy_may_open_as_many_files_as_its_user():
    from proxy.serving import allow_many_files

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
