"""Clients that attack: many requests ahead of their answers, garbage behind good ones, trailers and bodies without end."""

import asyncio
import errno
import json
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from proxy.client_protocol import ClientProtocol
from proxy.config import ClientLimits
from tests.stand_in.engine import Fault, normal_events

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
CHUNKED = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n".encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"


def post(body, headers=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {CHAT} HTTP/1.1\r\nhost: h\r\n{headers}content-length: {len(data)}\r\n\r\n".encode() + data


async def connect(rig):
    return await asyncio.open_connection("127.0.0.1", rig.port)


@pytest.mark.parametrize("between", [b"", post(STREAM), HEALTH], ids=["at once", "a stream", "by ASGI"])
@pytest.mark.parametrize("garbage", [b"\x00\x01 garbage\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"], ids=len)
async def test_garbage_behind_a_stream_cuts_it_off_and_writes_nothing_into_it(rig, between, garbage):
    rig.decodes[0].faults = [Fault(hold=asyncio.Event(), pause_after=3)]
    reader, writer = await connect(rig)
    writer.write(post(STREAM))
    async with asyncio.timeout(5):
        got = await reader.readuntil(b"tok")
        writer.write(between + garbage)
        got += await reader.read()
    writer.close()
    assert got.count(b"HTTP/1.1 ") == 1
    assert b"invalid_request_error" not in got
    assert not got.endswith(b"0\r\n\r\n")
    await asyncio.wait_for(rig.decodes[0].gone.wait(), 5)
    await rig.idle()


async def test_a_body_behind_another_request_has_its_own_time_to_arrive(make_rig, monkeypatch):
    monkeypatch.setattr("proxy.client_protocol._LINGER_S", 0.1)
    rig = await make_rig()
    second = post({**BODY, "user": "x" * 5000}, "connection: close\r\n")
    reader, writer = await connect(rig)
    async with asyncio.timeout(5):
        writer.write(post(BODY) + second[:500])
        await reader.readuntil(b"toktok")
        await asyncio.sleep(0.4)  # longer than a refused client would have
        writer.write(second[500:])
        assert b"HTTP/1.1 200" in await reader.read()
    writer.close()


async def test_a_body_that_follows_a_large_one_is_not_held_to_its_pace(make_rig):
    rig = await make_rig(limits=ClientLimits(body_seconds=0.4))
    first = post({**BODY, "user": "x" * 200_000})
    second = post({**BODY, "user": "y" * 2000}, "connection: close\r\n")
    reader, writer = await connect(rig)
    async with asyncio.timeout(5):
        writer.write(first[:150_000])
        await asyncio.sleep(0.3)
        writer.write(first[150_000:] + second[:1000])
        await asyncio.sleep(0.2)  # past the moment at which the first one would have been looked at
        writer.write(second[1000:])
        got = await reader.read()
    writer.close()
    assert got.count(b"HTTP/1.1 200") == 2


async def test_each_head_has_its_own_time_however_requests_and_reads_are_cut(make_rig):
    rig = await make_rig(limits=ClientLimits(head_seconds=0.4))
    reader, writer = await connect(rig)
    async with asyncio.timeout(5):
        writer.write(HEALTH[:9])
        for _ in range(6):
            await asyncio.sleep(0.1)
            writer.write(HEALTH[9:] + HEALTH[:9])
        writer.write(b"HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".join([b"", b""]))
        await asyncio.sleep(0)
        got = await reader.read()  # what is left of the last one comes too late
    writer.close()
    assert got.count(b"HTTP/1.1 200") >= 6


async def test_a_large_body_behind_another_request_waits_in_the_clients_hands(rig):
    gate = asyncio.Event()
    rig.decodes[0].faults = [Fault(hold=gate)]
    sent = post(BODY) + post({**BODY, "user": "x" * 16_000_000}, "connection: close\r\n")
    with socket.create_connection(("127.0.0.1", rig.port)) as client:
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(client, sent))
        await asyncio.wait_for(rig.decodes[0].arrived.wait(), 5)
        done, _ = await asyncio.wait([sending], timeout=0.7)
        assert not done
        gate.set()
        async with asyncio.timeout(30):
            await sending
            got = b""
            while piece := await loop.sock_recv(client, 1 << 16):
                got += piece
    assert got.count(b"HTTP/1.1 200") == 2


async def test_requests_by_the_thousand_ahead_of_their_answers_are_refused(rig):
    rig.decodes[0].faults = [Fault(hold=asyncio.Event())]
    got = await rig.raw(post(BODY) + HEALTH * 5000)
    assert got.startswith(b"HTTP/1.1 400")
    assert b"ahead of their answers" in got
    await rig.idle()


async def test_some_requests_ahead_of_their_answers_are_served(rig):
    got = await rig.raw(HEALTH * 100 + post(BODY, "connection: close\r\n"))
    assert got.count(b"HTTP/1.1 200") == 101


@pytest.mark.parametrize(
    "flood",
    [
        b"0\r\n" + b"".join(b"trailer-%d: x\r\n" % number for number in range(200_000)),
        b"0\r\ntrailer: " + b"x" * 3_000_000,
        b"2\r\n{}\r\n5;" + b"x" * 3_000_000,
    ],
    ids=["trailers", "one trailer", "a chunk extension"],
)
async def test_trailers_and_extensions_without_end_are_431_like_headers(rig, flood):
    reader, writer = await connect(rig)
    writer.write(CHUNKED + flood)
    async with asyncio.timeout(5):
        try:
            got = await reader.read()
        except ConnectionResetError:  # it was still sending
            got = b"HTTP/1.1 431"
    writer.transport.abort()
    assert got.startswith(b"HTTP/1.1 431")
    assert rig.prefills[0].requests == []


async def test_chunks_of_one_byte_are_a_body_like_any_other(rig):
    data = json.dumps({**BODY, "user": "x" * 30_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\nsome: trailer\r\n\r\n"
    got = await rig.raw(CHUNKED.replace(b"host", b"connection: close\r\nhost") + chunks)
    assert got.startswith(b"HTTP/1.1 200")
    assert len(rig.decodes[0].requests[0].json["user"]) == 30_000


@pytest.mark.parametrize("last", ["connection: close\r\n", ""], ids=["closed", "kept alive"])
async def test_a_client_that_leaves_a_little_of_its_answers_unread_is_cut_off(last):
    """As little as its connection can be closed with: too little for back-pressure to count its time."""
    made = []

    def accept():
        settings = uvicorn.Config(answer_at_length, log_config=None, timeout_keep_alive=1)
        made.append(ClientProtocol(ClientLimits(write_seconds=0.2), settings, ServerState(), {}))
        return made[-1]

    loop = asyncio.get_running_loop()
    server = await loop.create_server(accept, "127.0.0.1", 0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        async with asyncio.timeout(20):
            while not made or made[0].transport is None:
                await asyncio.sleep(0)
            (protocol,) = made
            while not protocol.transport.get_write_buffer_size():
                asked = protocol.server_state.total_requests
                await loop.sock_sendall(client, HEALTH)
                while protocol.server_state.total_requests == asked:
                    await asyncio.sleep(0)
            if last:
                await loop.sock_sendall(client, HEALTH.replace(b"host", last.encode() + b"host"))
            began = loop.time()
            while protocol in protocol.connections:
                await asyncio.sleep(0.02)
            assert loop.time() - began < 2
    server.close()


async def answer_at_length(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"20000")]})
    await send({"type": "http.response.body", "body": b"x" * 20_000})


async def test_running_out_of_files_blames_no_engine(make_rig, monkeypatch):
    rig = await make_rig(health_interval=0.02)

    async def full(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("proxy.engine_client._Pool.connect", full)
    monkeypatch.setattr("proxy.engine_client._Pool.reuse", lambda _: None)
    for _ in range(3):
        reply = await rig.client.post(CHAT, json=BODY)
        assert "Too many open files" in reply.json()["error"]["message"]
    await asyncio.sleep(0.1)  # several probes
    assert (await rig.client.get("/ready")).json() == {"ready": True, "missing": []}
    monkeypatch.undo()
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200


async def test_streams_go_on_while_others_attack(rig):
    gate = asyncio.Event()
    rig.decodes[0].faults = [Fault(hold=gate, pause_after=2)]
    stream = asyncio.create_task(rig.client.post(CHAT, json=STREAM))
    await asyncio.wait_for(rig.decodes[0].arrived.wait(), 5)
    for attack in (b"\x16\x03\x01", HEALTH * 2000, CHUNKED + b"zz\r\n", b"POST / HTTP/9.9\r\n\r\n", b"x" * 100_000):
        await rig.raw(attack + b"\r\n\r\n")
    gate.set()
    assert (await stream).content == b"".join(normal_events(CHAT, 4))
