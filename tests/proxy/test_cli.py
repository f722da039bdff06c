import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.stand_in.engine import StandIn, Wire

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
        ((*GOOD, "--host", "203.0.113.7"), "cannot listen there"),
        ((*GOOD, "--port", "0"), "--port"),
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
    assert "address already in use; choose another --port" in done.stderr


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
    ):
        assert words in text


async def test_sigterm_lets_a_stream_end_and_exits_with_0():
    import asyncio

    from tests.stand_in.engine import Fault

    wire = Wire()
    prefill, decode = await StandIn("prefill", wire).start(), await StandIn("decode", wire).start()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    proxy = subprocess.Popen(
        [sys.executable, "-m", "proxy", "--prefill", prefill.url, "--decode", decode.url, "--port", str(port), "--health-interval", "0.1"],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            async with asyncio.timeout(15):
                while True:
                    try:
                        if (await client.get("/ready")).status_code == 200:
                            break
                    except httpx.HTTPError:
                        pass
                    await asyncio.sleep(0.05)
            rest = asyncio.Event()
            decode.faults = [Fault(hold=rest, pause_after=3)]
            body = {"model": "m", "messages": [], "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = reply.aiter_lines()
                await anext(lines)
                os.kill(proxy.pid, signal.SIGTERM)
                async with asyncio.timeout(10):
                    while await accepts(port):
                        await asyncio.sleep(0.05)
                rest.set()
                assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await asyncio.to_thread(proxy.wait, 10) == 0
    finally:
        proxy.kill()
        proxy.wait()
        await prefill.stop()
        await decode.stop()
    assert wire.violations == []


async def accepts(port):
    import asyncio

    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
