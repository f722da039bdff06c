"""Reported failures of the kind: a client leaves, and engines go on working, connections stay, or counts drift."""

import asyncio
import gc
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.stand_in.engine import LIMIT_FIELDS, Fault
from tests.stand_in.fault import token

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
STREAM = {**BODY, "stream": True}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ROUTES = pytest.mark.parametrize("route", LIMIT_FIELDS)


def forever():
    return asyncio.Event()


# Phase of a request -> the engine that is at work in it, how it is held there, and the forms of answer that have it.
PHASES = {
    "prefill's headers": ("prefill", lambda: Fault(hold=forever()), (False, True)),
    "prefill's body": ("prefill", lambda: Fault(hold=forever(), pause_in_body=9), (False, True)),
    "decode's headers": ("decode", lambda: Fault(hold=forever()), (False, True)),
    "decode's body": ("decode", lambda: Fault(hold=forever(), pause_in_body=9), (False,)),
    "decode's first event": ("decode", lambda: Fault(hold=forever(), pause_after=0), (True,)),
    "decode's events": ("decode", lambda: Fault(hold=forever(), pause_after=3), (True,)),
    "a chunk of decode's": ("decode", lambda: Fault(events=_slowly(), chunk_delay=0.001), (True,)),
}


def _slowly():
    while True:
        yield token("x" * 100)


class Leaver:
    """A client on a bare socket, which can leave in more than one way."""

    def __init__(self, rig, route, body):
        self.request = httpx.Request("POST", f"http://127.0.0.1:{rig.port}{route}", json=body)
        self.port = rig.port

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        request = self.request
        lines = b"".join(b"%b: %b\r\n" % pair for pair in request.headers.raw)
        self.writer.write(b"POST %b HTTP/1.1\r\n%b\r\n%b" % (request.url.raw_path, lines, request.content))
        return self

    def leave(self, *, reset):
        if reset:
            self.writer.transport.abort()
        else:
            self.writer.close()

    async def __aexit__(self, *_):
        self.writer.close()


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize(("phase", "stream"), [(phase, stream) for phase in PHASES for stream in PHASES[phase][2]])
async def test_a_client_that_leaves_in_any_phase_ends_the_engines_work_within_a_second(shared, phase, stream, reset):
    # B24, B25
    role, held, _ = PHASES[phase]
    engine = shared.prefills[0] if role == "prefill" else shared.decodes[0]
    engine.faults = [held()]
    async with shared.counts("pdcluster_requests_total", 1, outcome="client_cancelled"):
        async with Leaver(shared, CHAT, {**BODY, "stream": stream}) as client:
            await asyncio.wait_for(engine.arrived.wait(), 5)
            if phase in ("decode's events", "a chunk of decode's"):
                await client.reader.readuntil(b"data:")
            left = asyncio.get_running_loop().time()
            client.leave(reset=reset)
            await asyncio.wait_for(engine.gone.wait(), 1)
        assert engine.requests[-1].left - left < 1
        await shared.idle()
    assert len(shared.decodes[0].requests) == (role == "decode")
    assert engine.now == 0


@ROUTES
async def test_a_client_of_any_api_that_leaves_ends_both_legs(shared, route):  # B24
    for engine in (shared.prefills[0], shared.decodes[0]):
        for record in (engine.arrived, engine.gone):
            record.clear()
        engine.faults = [Fault(hold=forever())]
        async with Leaver(shared, route, BODY) as client:
            await asyncio.wait_for(engine.arrived.wait(), 5)
            client.leave(reset=True)
            await asyncio.wait_for(engine.gone.wait(), 1)
        await shared.idle()
        shared.prefills[0].faults = []


async def test_a_client_that_leaves_while_it_sends_its_body_costs_nothing(shared):  # B24, B31
    async with shared.counts("pdcluster_requests_total", 1, outcome="client_cancelled"):
        reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{" % CHAT.encode())
        await writer.drain()
        await shared.client.get("/health")  # so the proxy has seen the first half
        writer.close()
        assert await reader.read() == b""
    assert shared.prefills[0].requests == []


async def test_a_client_that_shuts_its_sending_side_down_still_gets_its_answer_or_is_gone(shared):  # B24
    async with Leaver(shared, CHAT, BODY) as client:
        client.writer.write_eof()
        await asyncio.wait_for(client.reader.read(), 5)  # an answer, or the end: both in bounded time
    await shared.idle()


@STREAMS
async def test_clients_that_say_they_are_done_at_any_moment_are_no_bug_of_the_proxy(shared, stream):  # B24, B31
    async with shared.counts("pdcluster_requests_total", 0, outcome="internal_error"):
        for moment in range(40):
            async with Leaver(shared, CHAT, {**BODY, "stream": stream}) as client:
                for _ in range(moment):
                    await asyncio.sleep(0)
                client.writer.write_eof()
                await asyncio.wait_for(client.reader.read(), 5)
        await shared.idle()


async def test_a_client_that_sends_its_next_request_at_once_and_leaves_is_no_bug_of_the_proxy(shared):  # B24, B31
    sent = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % CHAT.encode()
    async with shared.counts("pdcluster_requests_total", 0, outcome="internal_error"):
        for more in (sent, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", sent[:30]) * 5:
            reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
            writer.write(sent + more)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        await shared.idle()


async def test_a_client_that_does_not_read_stops_decode_and_is_not_buffered_for(shared):  # B25
    shared.decodes[0].faults = [Fault(events=(token("x" * 65536) for _ in range(4000)))]
    async with Leaver(shared, CHAT, STREAM) as client:
        await asyncio.wait_for(shared.decodes[0].stalled.wait(), 10)
        (seen,) = shared.decodes[0].requests
        assert seen.chunks < 400  # of 4,000: 26 MB of 262 MB at most lie in buffers, most of them the kernel's
        client.leave(reset=True)
        await asyncio.wait_for(shared.decodes[0].gone.wait(), 2)
    await shared.idle()


async def test_a_client_that_reads_slowly_gets_everything(shared):  # B25
    shared.decodes[0].faults = [Fault(events=[*(token("x" * 65536) for _ in range(600)), b"data: [DONE]\n\n"])]
    async with shared.client.stream("POST", CHAT, json=STREAM) as reply:
        parts = reply.aiter_raw()
        total = [await anext(parts)]
        await asyncio.wait_for(shared.decodes[0].stalled.wait(), 10)
        total += [part async for part in parts]
    assert b"".join(total) == token("x" * 65536) * 600 + b"data: [DONE]\n\n"


def open_files():
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def _settled(rig):
    await rig.idle()
    await rig.client.get("/health")


@STREAMS
async def test_two_hundred_clients_that_leave_keep_open_files_and_connections_flat(shared, stream):  # B25, B30
    async def one():
        decode = shared.decodes[0]
        decode.forget()
        decode.faults = [Fault(hold=forever(), pause_after=3) if stream else Fault(hold=forever())]
        async with Leaver(shared, CHAT, {**BODY, "stream": stream}) as client:
            await asyncio.wait_for(decode.arrived.wait(), 5)
            if stream:
                await client.reader.readuntil(b"data:")
            client.leave(reset=True)
            await asyncio.wait_for(decode.gone.wait(), 2)

    for _ in range(10):
        await one()
    await _settled(shared)
    before = open_files()
    for _ in range(200):
        await one()
    await _settled(shared)

    async def flat():
        return open_files() <= before + 6 and len(shared.decodes[0].connections) <= 3

    await shared.until(flat)


async def test_errors_that_were_not_read_to_their_end_leave_no_connection_behind(shared):  # B30
    long = b'{"error":"' + b"x" * 100_000 + b'"}'
    before = open_files()
    for engine in (shared.prefills[0], shared.decodes[0]):
        for index in range(20):
            engine.faults = [Fault(status=503, body=long), Fault(status=503, body=long)]
            await shared.client.post(CHAT, json=STREAM if index % 2 else BODY)
        engine.faults = []

    async def flat():
        return open_files() <= before + 6

    await shared.until(flat)


async def test_hundreds_of_streams_at_once_meet_no_ceiling(shared):  # B30
    release, many = asyncio.Event(), 300
    shared.decodes[0].always = Fault(hold=release, pause_after=3)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Leaver(shared, CHAT, STREAM)) for _ in range(many)]

        async def all_there():
            return shared.decodes[0].now == many

        await shared.until(all_there, 10)
        assert await shared.metric("pdcluster_in_flight", endpoint="d0") == many
        release.set()
        await asyncio.gather(*(client.reader.readuntil(b"data: [DONE]\n\n") for client in clients))


async def test_whatever_becomes_of_requests_every_count_returns_to_zero_and_each_is_counted_once(make_rig):  # B31
    rig = await make_rig(prefills=2, decodes=2)
    kinds = [
        Fault(),
        Fault(close_before_headers=True, reset=True),
        Fault(),
        Fault(close_after=2),
        Fault(status=400),
        Fault(delay=0.01),
    ]
    for engine in rig.prefills + rig.decodes:
        engine.faults = [kinds[index % len(kinds)] for index in range(200)]

    async def one(index):
        call = asyncio.create_task(rig.client.post(CHAT, json=STREAM if index % 2 else BODY))
        if index % 3 == 0:
            for _ in range(index % 7):
                await asyncio.sleep(0)
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    for _ in range(4):
        await asyncio.gather(*(one(index) for index in range(40)))
    await rig.idle()
    for engine in rig.prefills + rig.decodes:
        assert engine.now == 0
    counted = await rig.metric("pdcluster_requests_total")
    assert counted == await rig.metric("pdcluster_request_seconds_count")
    assert counted <= 160
    assert await rig.metric("pdcluster_requests_total", outcome="internal_error") == 0
