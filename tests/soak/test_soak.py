"""Twenty thousand mixed requests with clients that leave and engines that fail: nothing may be left behind.

And a thousand streams at once through one process, three times over. `PDCLUSTER_SOAK_REQUESTS` sets another number.
"""

import asyncio
import json
import os
import random

import psutil
import pytest

from tests.proxy.running import Running
from tests.stand_in.engine import Fault, StandIn

REQUESTS = int(os.environ.get("PDCLUSTER_SOAK_REQUESTS", "20000"))
AT_ONCE = 48
KINDS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}),
    ("/v1/completions", {"prompt": "x" * 5000, "stream": True}),
    ("/v1/messages", {"messages": [], "max_tokens": 9, "stream": True}),
    ("/v1/responses", {"input": "hi", "stream": True}),
    ("/v1/responses", {"input": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
]
FAULTS = [
    lambda: Fault(status=500),
    lambda: Fault(status=503, headers={"retry-after": "1"}),
    lambda: Fault(status=400, body=b'{"error":{"message":"no"}}'),
    lambda: Fault(close_before_headers=True),
    lambda: Fault(close_after=2),
    lambda: Fault(end_after=2),
    lambda: Fault(body=b'{"half', cut_body=True),
    lambda: Fault(handoff=None),
]


class Faulty(StandIn):
    """Fails now and then."""

    def __init__(self, role, wire, rng):
        super().__init__(role, wire)
        self.rng = rng

    def _prefill(self, seen, fault):
        reply = super()._prefill(seen, fault)
        if reply["kv_transfer_params"] is None:
            self.wire.issued.popitem()  # nobody was given it
        return reply

    async def _answer(self, seen, writer):
        if seen.method == "POST" and not self.faults and self.rng.random() < 0.05:
            self.faults.append(self.rng.choice(FAULTS)())
        if len(self.requests) > 100:
            self.requests.clear()
            self.probes.clear()
        return await super()._answer(seen, writer)


async def ask(port, rng):
    """Send one request; leave early in one case of ten. Returns the status, 0 where we left."""
    path, fields = rng.choice(KINDS)
    body = json.dumps({"model": "m", **fields}).encode()
    leaves = rng.random() < 0.1
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        if leaves and rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.01)
            return 0
        line = await asyncio.wait_for(reader.readline(), 30)
        if leaves:
            return 0
        await asyncio.wait_for(reader.read(), 30)
        return int(line.split()[1])
    finally:
        writer.transport.abort()


async def put(port, count, rng):
    """Put `count` requests on the proxy; returns how often each status came."""
    statuses, numbers = {}, iter(range(count))

    async def client():
        for _ in numbers:
            status = await ask(port, rng)
            statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return statuses


def figure(text, name, label=""):
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " ")) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def settled(proxy):
    """Wait until nothing is in flight and idle connections are gone; returns the metrics."""
    async with asyncio.timeout(30):
        while figure((await proxy.client.get("/metrics")).text, "pdcluster_in_flight") > 0:
            await asyncio.sleep(0.1)
    await asyncio.sleep(5)  # what is idle is closed after 4 s
    return (await proxy.client.get("/metrics")).text


def usage(proxy):
    process = psutil.Process(proxy.process.pid)
    return process.memory_info().rss, process.num_fds()


@pytest.mark.timeout(900)
async def test_a_soak_leaves_nothing_behind():
    rng = random.Random(7)
    async with Running(make=lambda role, wire: Faulty(role, wire, rng)) as proxy:
        await put(proxy.port, min(2000, REQUESTS // 4), rng)
        await settled(proxy)
        memory, files = usage(proxy)
        statuses = await put(proxy.port, REQUESTS, rng)
        text = await settled(proxy)
        memory_after, files_after = usage(proxy)
        print(
            f"\nstatuses {statuses}; resident {memory / 1e6:.1f} -> {memory_after / 1e6:.1f} MB; files {files} -> {files_after}"
        )
        print(
            f"handoffs issued {len(proxy.wire.issued)}, used {len(proxy.wire.used)}, released {len(proxy.wire.released)}"
        )
        assert figure(text, "pdcluster_in_flight") == 0
        assert statuses[200] > 0.6 * REQUESTS
        assert set(statuses) <= {0, 200, 400, 500, 502, 503}
        assert memory_after <= memory * 1.05
        assert files_after <= files + 2
        lost = set(proxy.wire.issued) - proxy.wire.used - set(proxy.wire.released)
        assert len(lost) <= REQUESTS / 1000, "handoffs that nobody fetched and nobody released"
        assert figure(text, "pdcluster_handoffs_stranded_total") <= REQUESTS / 50  # decode broke off in silence


@pytest.mark.timeout(300)
async def test_a_thousand_streams_at_once_three_times_over_leave_nothing_behind():
    async with Running() as proxy:
        gate = asyncio.Event()
        proxy.decode.tokens = 20

        async def stream():
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\n")
            writer.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            data = await reader.read()
            writer.close()
            return data.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in data

        before = []
        for _ in range(4):
            gate.clear()
            proxy.decode.faults = [Fault(hold=gate, pause_after=2) for _ in range(1000)]
            streams = [asyncio.create_task(stream()) for _ in range(1000)]
            async with asyncio.timeout(60):
                while figure((await proxy.client.get("/metrics")).text, "pdcluster_in_flight", 'role="decode"') < 1000:
                    await asyncio.sleep(0.1)
            gate.set()
            assert all(await asyncio.gather(*streams))
            await settled(proxy)
            before.append(usage(proxy))
        print(f"\nresident and files after each round: {before}")
        (memory, files), *_, (memory_after, files_after) = before
        assert files_after <= files + 2
        assert memory_after <= memory * 1.05
