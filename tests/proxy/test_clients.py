"""The client's side: slow, hostile and pipelining clients, and the same routes under another server."""

import asyncio
import json

import pytest

from proxy.app import create_app
from proxy.client import AsgiClient, client_of
from proxy.config import ClientLimits
from tests.stand_in.engine import Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
QUICK = ClientLimits(head_seconds=0.2, body_seconds=0.2, write_seconds=0.5, head_bytes=4096)


def raw_request(body, *, path=CHAT, headers=""):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n{headers}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def connect(rig, **options):
    return await asyncio.open_connection("127.0.0.1", rig.port, **options)


async def all_of(reader, limit=5):
    return await asyncio.wait_for(reader.read(), limit)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n", b"408"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 99\r\n\r\n{", b"408"),
    ],
    ids=["nothing", "half a head", "half a body"],
)
async def test_a_client_that_sends_too_slowly_is_cut_off(make_rig, sent, status):
    rig = await make_rig(limits=QUICK)
    reader, writer = await connect(rig)
    writer.write(sent)
    answer = await all_of(reader)
    writer.close()
    if status is None:
        assert answer == b""
    else:
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in answer
    await rig.idle()


async def test_a_client_that_drips_its_body_is_cut_off_too(make_rig):
    rig = await make_rig(limits=QUICK)
    reader, writer = await connect(rig)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 999\r\n\r\n")

    async def drip():
        for _ in range(200):
            writer.write(b" ")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    answer = await all_of(reader)
    dripping.cancel()
    writer.close()
    assert b"bytes a second" in answer


@pytest.mark.parametrize("pieces", [1, 50])
async def test_headers_over_the_limit_are_431(make_rig, pieces):
    rig = await make_rig(limits=QUICK)
    reader, writer = await connect(rig)
    data = raw_request(BODY, headers="x-long: " + "y" * 5000 + "\r\n")
    for index in range(pieces):
        step = len(data) // pieces + 1
        writer.write(data[index * step : (index + 1) * step])
        await asyncio.sleep(0)
    answer = await all_of(reader)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 431")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert rig.prefills[0].requests == []


async def test_what_is_not_http_is_400_in_json(rig):
    reader, writer = await connect(rig)
    writer.write(b"\x16\x03\x01\x02\x00")
    answer = await all_of(reader)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "this is not HTTP/1.1"


async def test_a_client_that_reads_nothing_makes_its_engine_wait_and_slows_no_other(make_rig):
    rig = await make_rig(limits=ClientLimits(write_seconds=30))
    big = [b'data: {"choices":[{"delta":{"content":"' + b"x" * 100_000 + b'"}}]}\n\n'] * 400
    rig.decodes[0].faults = [Fault(events=[*big, b"data: [DONE]\n\n"])]
    reader, writer = await connect(rig, limit=1 << 10)
    writer.transport.pause_reading()
    writer.write(raw_request(STREAM))
    await rig.until(lambda: sent_by(rig, 1))
    for _ in range(5):
        assert (await rig.client.post(CHAT, json=STREAM)).text.endswith("data: [DONE]\n\n")
    assert await rig.metric("pdcluster_in_flight", role="decode") == 1
    writer.transport.resume_reading()
    received = 0
    while b"[DONE]" not in (data := await asyncio.wait_for(reader.read(1 << 20), 10)):
        received += len(data)
    assert received > 39_000_000
    writer.close()
    await rig.idle()


async def sent_by(rig, count):
    return len(rig.decodes[0].requests) >= count


async def test_a_client_that_never_reads_is_given_up_and_its_engine_freed(make_rig):
    rig = await make_rig(limits=QUICK)
    big = [b'data: {"choices":[{"delta":{"content":"' + b"x" * 1_000_000 + b'"}}]}\n\n'] * 60
    rig.decodes[0].faults = [Fault(events=big)]
    _, writer = await connect(rig, limit=1 << 10)
    writer.transport.pause_reading()
    writer.write(raw_request(STREAM))
    await asyncio.wait_for(rig.decodes[0].gone.wait(), 10)
    await rig.idle()
    assert await rig.metric("pdcluster_requests_total", outcome="client_cancelled") == 1
    writer.transport.abort()


async def test_pipelined_requests_are_answered_in_order(rig):
    reader, writer = await connect(rig)
    writer.write(raw_request(STREAM) + raw_request(BODY) + raw_request(STREAM, headers="connection: close\r\n"))
    answer = await all_of(reader)
    writer.close()
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.count(b"[DONE]") == 2
    assert answer.index(b"[DONE]") < answer.index(b"toktok") < answer.rindex(b"[DONE]")


async def test_pipelined_requests_whose_client_leaves_are_all_dropped(rig):
    rig.prefills[0].faults = [Fault(hold=asyncio.Event())]
    _, writer = await connect(rig)
    writer.write(raw_request(BODY) * 3)
    await asyncio.wait_for(rig.prefills[0].arrived.wait(), 5)
    writer.transport.abort()
    await rig.until(lambda: counted(rig, 1))
    await rig.idle()
    assert len(rig.prefills[0].requests) <= 2


async def counted(rig, count):
    return await rig.metric("pdcluster_requests_total", outcome="client_cancelled") >= count


async def test_a_client_that_waits_for_100_continue_gets_it(rig):
    reader, writer = await connect(rig)
    head, _, body = raw_request(BODY, headers="expect: 100-continue\r\nconnection: close\r\n").partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await all_of(reader)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_refused_client_that_goes_on_sending_is_cut_off_after_its_answer(make_rig):
    rig = await make_rig(limits=ClientLimits(body_bytes=1000))
    reader, writer = await connect(rig)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 99999999\r\n\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 413")

    async def flood():
        while not writer.transport.is_closing():
            writer.write(b" " * 1000)
            await asyncio.sleep(0.01)

    flooding = asyncio.create_task(flood())
    await all_of(reader, 6)
    flooding.cancel()
    writer.transport.abort()


async def chunks_of(client, body):
    async with client.stream("POST", CHAT, json=body) as reply:
        return reply.status_code, b"".join([chunk async for chunk in reply.aiter_raw()])


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
async def test_the_same_route_serves_under_any_asgi_server(make_rig, body):
    rig = await make_rig()
    other = await make_rig(http="h11")
    for engine in (rig.decodes[0], other.decodes[0]):
        engine.faults = [Fault()]
    assert await chunks_of(rig.client, body) == await chunks_of(other.client, body)
    other.decodes[0].faults = [Fault(hold=asyncio.Event(), pause_after=3)]
    async with other.client.stream("POST", CHAT, json=STREAM) as reply:
        await anext(reply.aiter_lines())
    await asyncio.wait_for(other.decodes[0].gone.wait(), 2)
    await other.idle()


async def test_a_middleware_that_wraps_send_sees_everything_that_is_sent():
    class Linked:
        send = print

    scope = {"headers": [], "extensions": {"pdcluster.client": Linked()}}
    assert client_of(scope, None, print).__class__ is Linked
    assert isinstance(client_of(scope, None, len), AsgiClient)


def test_the_application_is_documented_for_every_route_that_engines_serve():
    from proxy.config import EndpointConfig, ProxyConfig

    app = create_app(ProxyConfig((EndpointConfig("d", "http://127.0.0.1:1", "decode"),)))
    paths = app.openapi()["paths"]
    assert {"/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/models", "/metrics"} <= set(paths)
