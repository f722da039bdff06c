"""Reported failures of the kind: bodies that are too large, routes that should not be there, and a stop that cuts."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.proxy.test_cli import Running
from tests.stand_in.engine import Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
STREAM = {**BODY, "stream": True}
MB = 1_000_000


def large(size):
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "é" * (size // 6)}]}).encode()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_bodies_with_images_or_long_prompts_pass_whole_on_both_legs(shared, chunked):  # B48
    for size in (1.9, 2.1, 16):
        raw = large(int(size * MB))

        async def parts(raw=raw):
            for at in range(0, len(raw), 100_000):
                yield raw[at : at + 100_000]

        reply = await shared.client.post(CHAT, content=parts() if chunked else raw)
        assert reply.status_code == 200
        assert json.loads(shared.prefills[0].requests[-1].raw)["messages"] == json.loads(raw)["messages"]
        assert shared.decodes[0].requests[-1].raw.startswith(raw[:-1])
        shared.prefills[0].requests.clear()
        shared.decodes[0].requests.clear()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"], ids=["plain", "expect"])
async def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(shared, expect):  # B48, B43
    async with shared.counts("pdcluster_requests_total", 1, route=CHAT, outcome="client_error"):
        head = b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (CHAT.encode(), expect, 65 << 20)
        got = await shared.raw(head, until=b"}}")
    assert got.startswith(b"HTTP/1.1 413 ")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert shared.prefills[0].requests == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", ["/v1/messages", "/tokenize", "/v1/embeddings"])
async def test_the_limit_holds_on_every_route_in_the_apis_own_shape(shared, route):  # B48
    got = await shared.raw(
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (route.encode(), 1 << 40), until=b"}}"
    )
    assert got.startswith(b"HTTP/1.1 413 ")
    assert (b'"request_too_large"' in got) == (route == "/v1/messages")


async def test_memory_for_a_large_body_is_a_small_multiple_of_it_and_a_stop_finishes_what_runs(monkeypatch):
    # B42, B48, B67 drain: in one test, since a process of its own takes a second to start
    monkeypatch.setenv("PDCLUSTER_ENGINE_API_KEY", "engine-secret")
    async with Running() as proxy:
        assert (await proxy.client.post(CHAT, content=large(MB // 10))).status_code == 200
        before = peak(proxy.process.pid)
        raw = large(16 * MB)
        for _ in range(3):
            assert (await proxy.client.post(CHAT, content=raw)).status_code == 200
        assert peak(proxy.process.pid) - before < 10 * len(raw)

        rest = asyncio.Event()
        proxy.prefill.requests.clear()
        proxy.prefill.faults = [Fault(hold=rest), Fault(hold=rest)]
        calls = [asyncio.create_task(proxy.client.post(CHAT, json=body)) for body in (BODY, STREAM)]
        async with asyncio.timeout(5):
            while len(proxy.prefill.requests) < 2:
                await asyncio.sleep(0.01)
        os.kill(proxy.process.pid, signal.SIGTERM)
        await proxy.refuses_connections()
        rest.set()  # both still have a leg to run
        whole, streamed = await asyncio.gather(*calls)
        assert (whole.status_code, whole.headers["x-pdcluster-path"]) == (200, "disaggregated")
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert await proxy.exit_code() == 0
        for engine in (proxy.prefill, proxy.decode):
            assert {seen.headers.get("authorization") for seen in engine.requests + engine.probes} == {
                "Bearer engine-secret"
            }


def peak(pid):
    """Return the most memory that a process has had, in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


# Routes of engines that must not be reachable, and other spellings of ones that are.
HIDDEN = [
    *["/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/collective_rpc", "/server_info", "/reset_mm_cache"],
    *[
        "/reset_encoder_cache",
        "/start_profile",
        "/stop_profile",
        "/scale_elastic_ep",
        "/invocations",
        "/update_weights",
    ],
    *["/v1/unload_lora_adapter", "/kv_event_sources", "/load", "/ping", "/v1/models/m", "/v2/models", "/generate"],
    *["//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/", "/V1/chat/completions", "/v1/chat"],
    *[
        "/v1/chat/../../sleep",
        "/tokenize/../sleep",
        "/%2e%2e/sleep",
        "/tokenize%00",
        "/tokenize%2f..%2fsleep",
        "/tokenize;a=b",
    ],
]


@pytest.mark.asyncio(loop_scope="module")
async def test_routes_of_engines_that_are_not_on_the_list_are_404_in_every_method(shared):  # B42, B44
    for path in HIDDEN:
        for method in (b"GET", b"POST", b"PUT"):
            sent = b"%b %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
            got = await shared.raw(sent % (method, path.encode()))
            assert got.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ")), (method, path)
    assert shared.decodes[0].requests == []
    assert {seen.path for seen in shared.decodes[0].probes} <= {"/health", "/metrics"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"])
@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/tokenize", "/v1/models", "/health", "/metrics"])
async def test_a_wrong_method_is_405_with_the_right_ones(shared, route, method):  # B44
    reply = await shared.client.request(method, route)
    if method == "GET" and route in ("/v1/models", "/health", "/metrics"):
        assert reply.status_code == 200
        return
    assert reply.status_code in (405, 501)
    assert method == "HEAD" or reply.json()["error"]["message"]
    assert shared.decodes[0].requests == []


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_stops_mid_stream_costs_its_stream_and_no_other(make_rig):  # B67
    rig = await make_rig(decodes=2)
    rest = asyncio.Event()
    for engine in rig.decodes:
        engine.always = Fault(hold=rest, pause_after=3)
    calls = [asyncio.create_task(rig.client.post(CHAT, json=STREAM)) for _ in range(2)]

    async def both():
        return all(engine.now == 1 for engine in rig.decodes)

    await rig.until(both)
    await asyncio.sleep(0)
    await rig.decodes[0].stop()
    rest.set()
    texts = [(await call).text for call in calls]
    assert sum(text.endswith("data: [DONE]\n\n") for text in texts) >= 1
    assert all(text.endswith("data: [DONE]\n\n") or '"error"' in text for text in texts)
    rig.decodes[1].always = Fault()
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200
    with pytest.raises(httpx.HTTPError):
        await rig.client.get(rig.decodes[0].url + "/health")
