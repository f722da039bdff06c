"""Routes that are called without ASGI: among others on one connection, and with everything that HTTP allows a client."""

import asyncio
import json
import logging

import pytest

from tests.stand_in.engine import Fault, normal_events

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
CLOSE = "connection: close\r\n"
WHOLE_STREAM = b"".join(normal_events(CHAT, 4))


def post(body, *, path=CHAT, headers="", version="1.1"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = f"POST {path} HTTP/{version}\r\nhost: h\r\n{headers}content-length: {len(data)}\r\n\r\n"
    return lines.encode() + data


def get(path, headers=""):
    return f"GET {path} HTTP/1.1\r\nhost: h\r\n{headers}\r\n".encode()


def answers(data):
    """Split what came on one connection into (status, body) pairs; each must be whole."""
    found = []
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        assert end
        lines = head.lower().split(b"\r\n")
        if b"transfer-encoding: chunked" in lines:
            body, data = unchunked(data)
        else:
            (length,) = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
            body, data = data[:length], data[length:]
            assert len(body) == length
        found.append((int(head.split(b" ")[1]), body))
    return found


def unchunked(data):
    parts = []
    while True:
        size, end, data = data.partition(b"\r\n")
        assert end, "the stream broke off"
        length = int(size, 16)
        parts.append(data[:length])
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]
        if length == 0:
            return b"".join(parts), data


# What a client may ask on one connection, and what shows that it got the answer to it.
KINDS = {
    "direct stream": (post(STREAM), 200, WHOLE_STREAM),
    "direct whole": (post(BODY), 200, b"toktok"),
    "passed on": (post({"prompt": "x"}, path="/tokenize"), 200, b'{"echo":"/tokenize"}'),
    "refused": (post(b"{bad"), 400, b"not valid JSON"),
    "by ASGI, same route": (post(BODY, path=CHAT + "?a=b"), 200, b"toktok"),
    "by ASGI": (get("/health"), 200, b'{"status":"ok"}'),
    "by ASGI, refused": (get(CHAT), 405, b"not allowed here"),
    "nowhere": (post(BODY, path="/nowhere"), 404, b"no such route"),
}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
async def test_requests_of_all_sorts_on_one_connection_are_answered_in_order(shared, first, second):
    asked = [KINDS[first], KINDS[second], KINDS[first], KINDS["by ASGI"], KINDS[second]]
    last = post(BODY, headers=CLOSE)
    got = answers(await shared.raw(b"".join(sent for sent, _, _ in asked) + last))
    assert [status for status, _ in got] == [status for _, status, _ in asked] + [200]
    for (_, body), (_, _, mark) in zip(got, asked, strict=False):
        assert mark.replace(b" ", b"") in body.replace(b" ", b"")


async def test_requests_cut_anywhere_are_answered_the_same(shared):
    sent = post(STREAM) + get("/health") + post(BODY, headers=CLOSE)
    for step in (1, 3, 50, 99):
        reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
        async with asyncio.timeout(5):
            for at in range(0, len(sent), step):
                writer.write(sent[at : at + step])
                await asyncio.sleep(0)
            got = answers(await reader.read())
        writer.close()
        assert [status for status, _ in got] == [200, 200, 200]
        assert got[0][1] == WHOLE_STREAM


async def test_an_answer_that_is_slow_holds_up_those_behind_it_and_none_of_them_is_lost(shared):
    gate = asyncio.Event()
    shared.decodes[0].faults = [Fault(hold=gate, pause_after=2)]
    reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
    writer.write(post(STREAM) + get("/health") + post(BODY) + post(STREAM) + get("/health", CLOSE))
    await asyncio.wait_for(shared.decodes[0].arrived.wait(), 5)
    await asyncio.wait_for(reader.readuntil(b"tok"), 5)
    gate.set()
    rest = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert rest.count(b"[DONE]") == 2
    assert rest.count(b"HTTP/1.1 200") == 4


async def test_what_comes_behind_a_request_that_closes_is_not_served(shared):
    got = answers(await shared.raw(post(BODY, headers=CLOSE) + post(BODY) + get("/health")))
    assert [status for status, _ in got] == [200]
    assert len(shared.decodes[0].requests) == 1


@pytest.mark.parametrize("path", [CHAT, "/tokenize", CHAT + "?x=1"], ids=["direct", "passed on", "by ASGI"])
@pytest.mark.parametrize("word", ["100-continue", "100-Continue", "100-continue \t"])
async def test_a_client_that_expects_100_continue_gets_it_once_and_then_its_answer(shared, path, word):
    head, _, body = post(BODY, path=path, headers=f"expect: {word}\r\n{CLOSE}").partition(b"\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
    async with asyncio.timeout(5):
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        got = await reader.read()
    writer.close()
    assert [status for status, _ in answers(got)] == [200]


async def test_behind_another_request_100_continue_waits_for_its_turn(shared):
    gate = asyncio.Event()
    shared.decodes[0].faults = [Fault(hold=gate)]
    head, _, body = post(BODY, headers="expect: 100-continue\r\n" + CLOSE).partition(b"\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
    async with asyncio.timeout(5):
        writer.write(post(BODY) + head + b"\r\n\r\n")
        await shared.decodes[0].arrived.wait()
        gate.set()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b"HTTP/1.1 100 Continue\r\n\r\n")).count(b"HTTP/1.1") == 1
        writer.write(body)
        assert [status for status, _ in answers(await reader.read())] == [200]
    writer.close()


@pytest.mark.parametrize("length", [1 << 30, 2**64 - 1])
async def test_who_is_refused_by_its_headers_is_never_told_to_continue(shared, length):
    head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
    got = await shared.raw(head.encode(), until=b"}}")
    assert got.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in got


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("token", ["websocket", "h2c", "TLS/1.0", "nonsense"])
async def test_an_offer_to_go_on_otherwise_is_not_taken_and_the_body_is_read_in_whatever_pieces(shared, body, token):
    sent = post(body, headers=f"connection: upgrade\r\nupgrade: {token}\r\n")
    for cut in (len(sent), len(sent) - 1, sent.index(b"{"), sent.index(b"{") + 5, 40):
        reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
        async with asyncio.timeout(5):
            writer.write(sent[:cut])
            await asyncio.sleep(0.01)
            writer.write(sent[cut:])
            got = await reader.read()  # the connection ends with the answer: what would follow is not HTTP/1.1
        writer.close()
        ((status, text),) = answers(got)
        assert status == 200
        assert text == WHOLE_STREAM if body is STREAM else b"toktok" in text
    assert shared.decodes[0].requests[-1].json["messages"] == BODY["messages"]


@pytest.mark.parametrize("path", [CHAT, "/health"])
async def test_an_offer_without_a_body_is_answered_and_what_follows_it_is_not_parsed(shared, path):
    sent = f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n\x81\x05hello"
    ((status, _),) = answers(await shared.raw(sent.encode("latin-1") + get("/health")))
    assert status == (405 if path == CHAT else 200)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("headers", ["", "connection: keep-alive\r\n"], ids=["plain", "keep-alive"])
async def test_http_1_0_gets_an_answer_without_chunks_that_ends_with_the_connection(shared, body, headers):
    got = await shared.raw(post(body, version="1.0", headers=headers) + get("/health"))
    head, _, text = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert text == WHOLE_STREAM if body is STREAM else b"toktok" in text
    assert text.count(b"HTTP/1.1") == 0


async def test_http_1_0_is_told_of_an_engine_that_broke_off(shared):
    shared.decodes[0].faults = [Fault(close_after=3)]
    got = await shared.raw(post(STREAM, version="1.0"))
    assert b'"error"' in got
    assert b"[DONE]" not in got


class BrokenError(Exception):
    """A bug of ours, played."""


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
async def test_a_bug_before_the_answer_is_500_and_the_connection_goes_on(shared, monkeypatch, caplog, body):
    def broken(*_):
        raise BrokenError

    monkeypatch.setattr("proxy.inference.InferenceRequest", broken)
    sent = post(body) + get("/health", CLOSE)
    assert [status for status, _ in answers(await shared.raw(sent))] == [500, 200]
    assert "bug while answering" in caplog.text


@pytest.mark.parametrize("path", [CHAT, CHAT + "?x=1"], ids=["direct", "by ASGI"])
async def test_a_bug_within_an_answer_closes_the_connection_and_what_waits_behind_it_is_not_served(
    shared, monkeypatch, caplog, path
):
    async def broken(client, *_):
        client._cycle.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhal\r\n")
        client._cycle.response_started = True
        raise BrokenError

    monkeypatch.setattr("proxy.linked_client.LinkedClient.relay", broken)
    caplog.set_level(logging.ERROR)
    async with shared.counts("pdcluster_requests_total", 1, outcome="internal_error"):
        got = await shared.raw(post(STREAM, path=path) + get("/health"))
        assert got.endswith(b"hal\r\n")
        assert b"0\r\n\r\n" not in got
    assert "BrokenError" in caplog.text
    await shared.idle()


@pytest.mark.parametrize("close", ["close_after", "reset"])
async def test_a_stream_whose_engine_breaks_off_ends_in_order_with_an_error_event(shared, close):
    shared.decodes[0].faults = [Fault(close_after=3, reset=close == "reset")]
    first, second = answers(await shared.raw(post(STREAM) + post(BODY, headers=CLOSE)))
    assert first[0] == second[0] == 200
    assert b'"error"' in first[1]
    assert b"[DONE]" not in first[1]


async def test_the_same_header_twice_means_the_last_one_on_both_ways(shared):
    for path in (CHAT, CHAT + "?x=1"):
        twice = "x-request-id: first\r\nX-Request-Id: second\r\n" + CLOSE
        got = await shared.raw(post(BODY, path=path, headers=twice))
        assert b"x-request-id: second\r\n" in got


async def test_blanks_around_a_header_are_no_part_of_it(shared):
    for path in (CHAT, CHAT + "?x=1"):
        got = await shared.raw(post(BODY, path=path, headers="x-request-id: \t mine \t \r\n" + CLOSE))
        assert b"x-request-id: mine\r\n" in got
    assert shared.decodes[0].requests[-1].headers["x-request-id"].startswith("pdc-")
