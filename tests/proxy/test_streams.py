"""How a stream ends, and answers that are not what was asked for."""

import asyncio
import json

import pytest

from proxy.firewall import EventCleaner
from tests.stand_in.engine import Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
TOKEN = b'data: {"choices":[{"delta":{"content":"tok"}}]}\n\n'
FAILED = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "events", [[TOKEN, FAILED, DONE], [TOKEN, FAILED + DONE], [TOKEN + FAILED, DONE], [TOKEN, FAILED]], ids=str
)
@pytest.mark.parametrize("byte_by_byte", [False, True])
async def test_an_error_that_the_engine_reports_mid_stream_is_the_last_event(rig, events, byte_by_byte):
    rig.decodes[0].faults = [Fault(events=events, byte_by_byte=byte_by_byte)]
    reply = await rig.client.post(CHAT, json=STREAM)
    assert reply.status_code == 200
    assert [line for line in reply.text.split("\n") if line.startswith("data: {")][-1] == FAILED.decode().strip()
    assert reply.text.count('"error"') == 1
    assert byte_by_byte or "[DONE]" not in reply.text
    assert await rig.metric("pdcluster_requests_total", outcome="upstream_aborted", route=CHAT) == 1


async def test_a_failed_response_counts_as_aborted_and_ends_as_its_api_ends(rig):
    events = [
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n',
        b'event: response.failed\ndata: {"type":"response.failed"}\n\n',
    ]
    rig.decodes[0].faults = [Fault(events=events)]
    reply = await rig.client.post("/v1/responses", json=STREAM)
    assert reply.content == b"".join(events)
    assert await rig.metric("pdcluster_requests_total", outcome="upstream_aborted", route="/v1/responses") == 1


async def test_text_that_looks_like_the_end_or_an_error_is_neither(rig):
    text = json.dumps({"choices": [{"delta": {"content": '\ndata: [DONE]\n\ndata: {"error": 1}'}}]})
    events = [f"data: {text}\n\n".encode(), TOKEN]
    rig.decodes[0].faults = [Fault(events=[*events, DONE]), Fault(events=events)]
    assert (await rig.client.post(CHAT, json=STREAM)).content == b"".join([*events, DONE])
    assert await rig.metric("pdcluster_requests_total", outcome="ok") == 1
    assert "before it was complete" in (await rig.client.post(CHAT, json=STREAM)).text


async def test_a_client_that_leaves_once_it_has_everything_was_served(rig):
    rig.decodes[0].faults = [Fault(events=[TOKEN, DONE, b": bye\n\n"], hold=asyncio.Event(), pause_after=2)]
    async with rig.client.stream("POST", CHAT, json=STREAM) as reply:
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                break
    await rig.idle()
    assert await rig.metric("pdcluster_requests_total", outcome="ok") == 1


async def test_a_first_event_that_blames_the_request_is_a_4xx_without_a_retry(rig):
    error = b'{"error": {"message": "bad grammar", "type": "BadRequestError", "code": 400}}'
    rig.decodes[0].faults = [Fault(events=[b"data: " + error + b"\n\n", DONE])]
    reply = await rig.client.post(CHAT, json=STREAM)
    assert (reply.status_code, reply.content) == (400, error)
    assert reply.headers["content-type"] == "application/json"
    assert len(rig.prefills[0].requests) == 1
    assert await rig.metric("pdcluster_requests_total", outcome="client_error") == 1


async def test_a_whole_answer_to_a_request_for_a_stream_is_passed_on_whole(rig):
    rig.decodes[0].faults = [Fault(body=b'{"choices":[],"kv_transfer_params":null}')]
    reply = await rig.client.post(CHAT, json=STREAM)
    assert (reply.status_code, reply.content) == (200, b'{"choices":[]}')
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_compressed_answer_reaches_the_client_readable(rig, stream):
    rig.decodes[0].faults = [Fault(gzip=True)] * 2
    reply = await rig.client.post(CHAT, json={**BODY, "stream": stream})
    assert reply.status_code == 200
    assert "content-encoding" not in reply.headers
    assert len(rig.decodes[0].requests) == 1
    assert reply.text.endswith("data: [DONE]\n\n") if stream else reply.json() == {"id": "x"}


@pytest.mark.parametrize("newline", [b"\n\n", b"\r\n\r\n"], ids=["lf", "crlf"])
async def test_comments_many_lines_and_a_huge_line_arrive_as_they_were_sent(rig, newline):
    events = [
        b": keep-alive" + newline,
        b'data: {"choices":\ndata: [{"delta":{"content":"a"}}]}' + newline,
        b'data: {"choices":[{"delta":{"content":"' + b"x" * 3_000_000 + b'"}}]}' + newline,
        b"data: [DONE]" + newline,
    ]
    rig.decodes[0].faults = [Fault(events=events)]
    reply = await rig.client.post(CHAT, json=STREAM)
    assert reply.content == b"".join(events)
    assert await rig.metric("pdcluster_requests_total", outcome="ok") == 1


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_handoffs_in_events_are_taken_out_wherever_the_stream_is_cut(size):
    inner = {"id": "r", "text": "\ud83d é", "kv_transfer_params": {"remote_host": "10.0.0.1"}}
    events = b'event: a\ndata: {"x":1,"ec_transfer_params":null}\n\n'
    events += b"event: response.completed\ndata: " + json.dumps({"response": inner, "n": 1}).encode() + b"\n\n"

    cleaner = EventCleaner()
    out = b"".join([cleaner.feed(events[start : start + size]) for start in range(0, len(events), size)])
    out += cleaner.rest()
    first, second, rest = out.split(b"\n\n")
    assert first == b'event: a\ndata: {"x":1}'
    assert json.loads(second.partition(b"data: ")[2]) == {"response": {"id": "r", "text": "\ud83d é"}, "n": 1}
    assert rest == b""
