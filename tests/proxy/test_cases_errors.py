"""Reported failures of the kind: an engine's error that the client never saw, saw changed, or saw as success."""

import asyncio
import json

import pytest

from tests.stand_in.engine import LIMIT_FIELDS, Fault
from tests.stand_in.fault import token

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
STREAM = {**BODY, "stream": True}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ROUTES = pytest.mark.parametrize("route", LIMIT_FIELDS)
REFUSAL = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
DONE = b"data: [DONE]\n\n"


def calls(rig):
    return len(rig.prefills[0].requests), len(rig.decodes[0].requests)


@STREAMS
@ROUTES
async def test_each_status_of_decode_is_the_clients_even_where_a_stream_was_asked_for(shared, route, stream):  # B09
    for status in (400, 401, 403, 404, 409, 413, 422, 429):
        shared.decodes[0].faults = [Fault(status=status, body=REFUSAL, headers={"retry-after": "7"})]
        reply = await shared.client.post(route, json={**BODY, "stream": stream})
        assert (reply.status_code, reply.content) == (status, REFUSAL)
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["retry-after"] == "7"
    assert calls(shared) == (8, 8)


@STREAMS
@ROUTES
async def test_each_4xx_of_prefill_is_the_clients_after_one_call_and_decode_is_not_asked(shared, route, stream):  # B10
    for status in (400, 401, 403, 404, 409, 413, 422, 429):
        shared.prefills[0].faults = [Fault(status=status, body=REFUSAL, headers={"retry-after": "7"})]
        reply = await shared.client.post(route, json={**BODY, "stream": stream})
        assert (reply.status_code, reply.content) == (status, REFUSAL)
        assert reply.headers["content-type"] == "application/json"
    assert calls(shared) == (8, 0)


async def test_an_error_that_is_no_json_keeps_its_bytes_and_type(shared):  # B09
    page = b"<html>\xff\x00 too large</html>"
    shared.decodes[0].faults = [Fault(status=413, body=page, headers={"content-type": "text/html"})]
    reply = await shared.client.post(CHAT, json=STREAM)
    assert (reply.status_code, reply.content, reply.headers["content-type"]) == (413, page, "text/html")


@STREAMS
async def test_an_empty_error_stays_an_error(shared, stream):  # B09
    shared.decodes[0].faults = [Fault(status=422, body=b" ")]
    assert (await shared.client.post(CHAT, json={**BODY, "stream": stream})).status_code == 422


@STREAMS
@pytest.mark.parametrize("status", [301, 304, 307])
async def test_a_redirect_of_an_engine_is_followed_by_nobody_and_is_no_success(shared, status, stream):  # B09
    where = {"location": shared.prefills[0].url + "/secret"}
    for engine, leg in ((shared.prefills[0], "prefill"), (shared.decodes[0], "decode")):
        await shared.sound()
        engine.faults = [Fault(status=status, body=b"{}", headers=where)] * 2
        reply = await shared.client.post(CHAT, json={**BODY, "stream": stream})
        assert not [seen for seen in shared.prefills[0].requests + shared.prefills[0].probes if "secret" in seen.path]
        assert "location" not in reply.headers, leg
        engine.faults = []


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("after", ["7", "Wed, 21 Oct 2026 07:28:00 GMT", "0"])
async def test_retry_after_of_a_full_engine_reaches_the_client_and_is_no_failure(shared, leg, after):  # B43
    engine = shared.prefills[0] if leg == "prefill" else shared.decodes[0]
    for stream in (False, True):
        for _ in range(4):
            engine.faults = [Fault(status=429, body=REFUSAL, headers={"retry-after": after})]
            reply = await shared.client.post(CHAT, json={**BODY, "stream": stream})
            assert (reply.status_code, reply.headers["retry-after"]) == (429, after)
    name = "p0" if leg == "prefill" else "d0"
    assert await shared.metric("pdcluster_endpoint_state", endpoint=name, state="ready") == 1


BREAKS = {
    "reset": Fault(close_after=3, reset=True),
    "closed": Fault(close_after=3),
    "ended": Fault(end_after=3),
    "without length": Fault(end_after=3, until_close=True),
    "reset without length": Fault(close_after=3, until_close=True, reset=True),
}


@pytest.mark.parametrize("kind", BREAKS)
@ROUTES
async def test_a_stream_that_breaks_in_whatever_way_ends_with_one_error_event_and_nothing_forged(shared, route, kind):
    # B11
    shared.decodes[0].faults = [BREAKS[kind]]
    async with shared.counts("pdcluster_requests_total", 1, outcome="upstream_aborted", route=route):
        reply = await shared.client.post(route, json=STREAM)
    assert reply.status_code == 200
    assert reply.text.count('"error"') - reply.text.count('"type":"error"') == 1
    for forged in ("[DONE]", "finish_reason", "message_stop", "response.completed"):
        assert forged not in reply.text
    assert json.loads(reply.text.strip().rpartition("data: ")[2])["error"]["message"].startswith("decode: ")
    assert calls(shared) == (1, 1)


async def test_an_event_that_was_cut_in_the_middle_is_not_glued_to_the_error(shared):  # B11
    shared.decodes[0].faults = [Fault(events=[token("a"), b'data: {"choices":[{"delta":{"cont'])]
    reply = await shared.client.post(CHAT, json=STREAM)
    *whole, cut, error = [event for event in reply.text.split("\n\n") if event]
    assert whole == [token("a").decode().strip()]
    assert cut == 'data: {"choices":[{"delta":{"cont'
    assert json.loads(error.removeprefix("data: "))["error"]


async def test_the_last_event_decides_even_where_the_connection_breaks_after_it(shared):  # B11
    shared.decodes[0].faults = [Fault(events=[token("a"), DONE, b": more\n\n"], close_after=2, reset=True)]
    async with shared.counts("pdcluster_requests_total", 1, outcome="ok", route=CHAT):
        reply = await shared.client.post(CHAT, json=STREAM)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert "error" not in reply.text


@pytest.mark.parametrize("at", [1, 20, 45])
@pytest.mark.parametrize("how", [{"cut_body": True}, {"length_off": 1}, {"length_off": 10_000}], ids=str)
async def test_a_whole_answer_that_is_cut_is_502_after_a_new_prefill_never_half_a_document(shared, how, at):  # B11
    await shared.sound()
    whole = json.dumps({"id": "x", "choices": [{"message": {"content": "tok"}}]}).encode()
    shared.decodes[0].faults = [Fault(body=whole[:at], **how)] * 2
    reply = await shared.client.post(CHAT, json=BODY)
    assert reply.status_code == 502
    assert reply.json()["error"]["type"] == "upstream_error"
    assert calls(shared) == (2, 2)


async def test_a_prefill_that_is_cut_is_asked_again_and_its_half_answer_is_no_handoff(shared):  # B11, B13
    await shared.sound()
    shared.prefills[0].faults = [Fault(length_off=30)]
    reply = await shared.client.post(CHAT, json=BODY)
    assert reply.headers["x-pdcluster-path"] == "disaggregated"
    assert calls(shared) == (2, 1)


@STREAMS
@pytest.mark.parametrize(
    "junk",
    [b"\x00\x01\x02", b"HTTP/1.1\r\n\r\n", b"HTTP/9.9 200 OK\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 200 OK\r\na: " + b"x" * 200_000, b"HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n"],
    ids=lambda junk: repr(junk[:28]),
)  # fmt: skip
async def test_an_engine_that_speaks_no_http_is_502_and_never_a_bug(shared, junk, stream):
    await shared.sound()
    async with shared.counts("pdcluster_requests_total", 0, outcome="internal_error"):
        for engine in (shared.decodes[0], shared.prefills[0]):
            engine.faults = [Fault(raw=junk)] * 2
            reply = await shared.client.post(CHAT, json={**BODY, "stream": stream})
            if engine is shared.decodes[0]:
                assert reply.status_code in (502, 999)
                assert "internal" not in reply.text
            else:
                assert reply.status_code in (200, 999)
            await shared.sound()


async def test_an_error_of_the_proxy_has_the_shape_of_the_api_that_was_called(shared):  # B09
    await shared.sound()
    for route in LIMIT_FIELDS:
        shared.decodes[0].faults = [Fault(close_before_headers=True)] * 2
        reply = await shared.client.post(route, json=BODY)
        await shared.sound()
        assert reply.status_code == 502
        value = reply.json()
        assert value["error"]["message"].startswith("decode: d0")
        assert (value.get("type") == "error") == (route == "/v1/messages")
        assert "Traceback" not in reply.text


async def test_a_stream_whose_error_comes_late_is_still_watched_by_nobody_twice(shared):  # B11
    gate = asyncio.Event()
    failed = b'data: {"error":{"message":"late","code":500}}\n\n'
    shared.decodes[0].faults = [Fault(events=[token("a"), failed, DONE], gates=[_set(), gate])]
    async with shared.client.stream("POST", CHAT, json=STREAM) as reply:
        lines = reply.aiter_lines()
        assert '"a"' in await anext(lines)
        gate.set()
        rest = [line async for line in lines if line]
    assert rest == [failed.decode().strip()]
    assert calls(shared) == (1, 1)


def _set():
    event = asyncio.Event()
    event.set()
    return event
