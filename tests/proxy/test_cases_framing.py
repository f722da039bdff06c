"""Reported failures of the kind: what an engine sent is gathered, cut, glued together or misread on its way."""

import asyncio
import json

import pytest

from tests.stand_in.engine import LIMIT_FIELDS, Fault, normal_events
from tests.stand_in.fault import crlf, many_lines, token, with_comments

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
STREAM = {**BODY, "stream": True}
ROUTES = pytest.mark.parametrize("route", LIMIT_FIELDS)
DONE = b"data: [DONE]\n\n"
# What each API's stream holds before the first event that means something.
PREAMBLE = {CHAT: 1, "/v1/completions": 0, "/v1/responses": 2, "/v1/messages": 1}


@ROUTES
async def test_no_event_waits_for_the_next_one(shared, route):  # B50, gated
    events = [event.replace(b',"kv_transfer_params":null', b"") for event in normal_events(route, 6)]
    gates = [asyncio.Event() for _ in events]
    shared.decodes[0].faults = [Fault(events=events, gates=gates)]
    for gate in gates[: PREAMBLE[route] + 1]:
        gate.set()
    async with shared.client.stream("POST", route, json=STREAM) as reply:
        assert reply.status_code == 200
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"
        assert "content-length" not in reply.headers
        parts, got = reply.aiter_raw(), b""
        for index in range(PREAMBLE[route], len(events)):
            gates[index].set()
            async with asyncio.timeout(2):
                while len(got) < len(b"".join(events[: index + 1])):
                    got += await anext(parts)
            assert got == b"".join(events[: index + 1])
        assert [part async for part in parts] == []


@ROUTES
@pytest.mark.parametrize(
    "how",
    [{}, {"until_close": True}, {"byte_by_byte": True}, {"gzip": True}, {"interim": b"HTTP/1.1 100 Continue\r\n\r\n"}, {"interim": b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"}, {"byte_by_byte": True, "until_close": True}],
    ids=str,
)  # fmt: skip
async def test_a_stream_is_the_same_however_it_is_framed(shared, route, how):
    events = [event.replace(b',"kv_transfer_params":null', b"") for event in normal_events(route, 4)]
    shared.decodes[0].faults = [Fault(**how), Fault(**how)]
    for _ in range(2):
        reply = await shared.client.post(route, json=STREAM)
        assert reply.content == b"".join(events)
        assert not {"content-encoding", "link", "content-length"} & reply.headers.keys()


@pytest.mark.parametrize(
    "how",
    [{"chunked": True}, {"until_close": True}, {"byte_by_byte": True}, {"chunked": True, "byte_by_byte": True}, {"interim": b"HTTP/1.1 100 Continue\r\n\r\n"}, {"headers": {"x-long": "x" * 8000}}],
    ids=lambda how: str(how)[:40],
)  # fmt: skip
async def test_a_whole_answer_is_the_same_however_it_is_framed(shared, how):
    body = json.dumps({"id": "x", "choices": [{"message": {"content": "é" * 100}}]}).encode()
    shared.decodes[0].faults = [Fault(body=body, **how)] * 3
    for _ in range(3):
        reply = await shared.client.post(CHAT, json=BODY)
        assert (reply.status_code, reply.content) == (200, body)
        assert reply.headers["content-length"] == str(len(body))


@ROUTES
@pytest.mark.parametrize("byte_by_byte", [False, True], ids=["events", "bytes"])
@pytest.mark.parametrize("dress", [crlf, with_comments], ids=["crlf", "comments"])
async def test_a_stream_in_another_dress_is_whole_and_kept(shared, route, dress, byte_by_byte):
    events = dress([event.replace(b',"kv_transfer_params":null', b"") for event in normal_events(route, 3)])
    shared.decodes[0].faults = [Fault(events=events, byte_by_byte=byte_by_byte)]
    async with shared.counts("pdcluster_requests_total", 1, outcome="ok", route=route):
        reply = await shared.client.post(route, json=STREAM)
        assert reply.content == b"".join(events)


async def test_an_event_over_many_lines_is_one_event(shared):
    events = [many_lines(b'data: {"id":"x","choices":[{"delta":{"content":"a"},"index":0}]}\n\n'), DONE]
    assert events[0].count(b"data: ") > 2
    shared.decodes[0].faults = [Fault(events=events, byte_by_byte=True)]
    assert (await shared.client.post(CHAT, json=STREAM)).content == b"".join(events)


@pytest.mark.parametrize("size", [65_535, 65_536, 1 << 20, 9_000_000])
async def test_a_huge_line_passes_and_what_follows_it_too(shared, size):
    events = [token("a"), token("x" * size), token("b"), DONE]
    shared.decodes[0].faults = [Fault(events=events)]
    assert (await shared.client.post(CHAT, json=STREAM)).content == b"".join(events)


async def test_a_first_event_larger_than_any_peek_passes(shared):
    events = [token("x" * 3_000_000), DONE]
    shared.decodes[0].faults = [Fault(events=events)]
    assert (await shared.client.post(CHAT, json=STREAM)).content == b"".join(events)


async def test_many_events_in_one_piece_are_all_there(shared):
    events = [b"".join([token(str(index)) for index in range(5000)]) + DONE]
    shared.decodes[0].faults = [Fault(events=events)]
    async with shared.counts("pdcluster_requests_total", 1, outcome="ok"):
        assert (await shared.client.post(CHAT, json=STREAM)).content == events[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_bytes_after_an_answer_are_never_taken_for_the_next_one(shared, stream):
    forged = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n" + b'{"evil":1}'
    for trailing in (forged, b"garbage", b"\r\n\r\n"):
        for engine in (shared.decodes[0], shared.prefills[0]):
            engine.faults = [Fault(trailing=trailing)]
        for _ in range(3):
            reply = await shared.client.post(CHAT, json={**BODY, "stream": stream})
            await shared.ready()
            assert reply.status_code == 200
            assert "evil" not in reply.text
            assert reply.text.endswith("data: [DONE]\n\n") if stream else reply.json()["id"] == "x"
            assert reply.headers["x-pdcluster-path"] == "disaggregated"


async def test_an_answer_longer_than_announced_is_cut_there_and_its_rest_belongs_to_nobody(shared):
    body = b'{"id":"x","choices":[]}'
    shared.decodes[0].faults = [Fault(body=body + b'{"evil":1}', length_off=-10)]
    for _ in range(3):
        reply = await shared.client.post(CHAT, json=BODY)
        await shared.ready()
        assert reply.status_code == 200
        assert "evil" not in reply.text
    assert reply.json()["id"] == "x"


async def test_an_unexpected_word_on_an_idle_connection_costs_no_request(shared):
    for _ in range(3):
        shared.decodes[0].faults = [Fault(trailing=b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")]
        assert (await shared.client.post(CHAT, json=BODY)).status_code == 200
        assert (await shared.client.post(CHAT, json=BODY)).status_code == 200
        await shared.ready()


@pytest.mark.parametrize("sent", [b"100-continue", b"100-Continue"])
async def test_a_client_that_waits_for_100_continue_gets_it(shared, sent):
    raw = json.dumps(BODY).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nexpect: %b\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), sent, len(raw))
    reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
    writer.write(head)
    async with asyncio.timeout(5):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(raw)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert not [seen for seen in shared.prefills[0].requests if "expect" in seen.headers]


async def test_requests_one_after_another_on_one_connection_get_their_own_answers(shared):
    reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
    raws = [json.dumps({**BODY, "user": str(index)}).encode() for index in range(5)]
    shared.decodes[0].faults = [Fault(body=b'{"n":%d}' % index) for index in range(5)]
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    async with asyncio.timeout(5):
        for index, raw in enumerate(raws):
            writer.write(head % (CHAT.encode(), len(raw)) + raw)
            lines = await reader.readuntil(b"\r\n\r\n")
            assert lines.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(7) == b'{"n":%d}' % index
    writer.close()


async def test_a_client_that_speaks_http_1_0_gets_a_stream_without_chunks(shared):
    raw = json.dumps(STREAM).encode()
    got = await shared.raw(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(raw)) + raw)
    head, _, body = got.partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"chunked" not in head.lower()
    assert body == b"".join(normal_events(CHAT, 4))
