"""One request: what is sent, what is taken from its events, and the name of everything that can go wrong."""

import asyncio
import itertools
import socket

import pytest

from pdcluster.errors import UserError
from pdcluster.replay.exchange import Answer, Target, ask, parse_target
from tests.pdcluster.replay.endpoint import HEAD, chunk, endpoint, event, plain, stream, usage


async def answered(*pieces):
    answer = Answer()
    async with endpoint(lambda number: pieces) as served:
        request = served.target.request("/v1/chat/completions", b'{"n":1}')
        await asyncio.wait_for(ask(served.target, request, answer, itertools.count(1.0).__next__), 5)
    return answer


async def test_events_with_text_are_counted_and_usage_is_taken():
    whole = stream(event("", model="m"), event("a"), event("b"), usage(5, prompt=40, cached=16))
    answer = await answered(whole)
    assert (answer.status, answer.error, answer.complete, answer.events) == (200, "", True, 2)
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (5, 40, 16)


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_every_kind_of_text_is_a_first_token(key):
    answer = Answer()
    answer.take(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', 1.0)
    answer.take(b'{"choices":[{"delta":{"%s":"x"}}]}' % key.encode(), 2.0)
    answer.take(b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', 3.0)
    assert (answer.first, answer.last, answer.events) == (2.0, 2.0, 1)


def test_completions_have_their_text_in_the_choice():
    answer = Answer()
    answer.take(b'{"choices":[{"text":"x"}]}', 1.0)
    answer.take(b'{"choices":[{"text":"y"}]}', 4.0)
    assert (answer.first, answer.last, answer.events) == (1.0, 4.0, 2)


@pytest.mark.parametrize("size", [1, 2, 5, 17])
async def test_events_are_found_wherever_a_read_ends(size):
    data = stream(event("a"), event("b").replace(b"\n", b"\r\n"), b": a comment\n\n", usage(2))
    answer = Answer()
    loop = asyncio.get_running_loop()
    from pdcluster.replay.exchange import _Connection

    over = loop.create_future()
    connection = _Connection(b"", answer, itertools.count(1.0).__next__, over)
    for start in range(0, len(data), size):
        connection.data_received(data[start : start + size])
    assert over.done()
    assert (answer.error, answer.complete, answer.events, answer.tokens) == ("", True, 2, 2)
    assert answer.first < answer.last


@pytest.mark.parametrize(
    ("pieces", "error", "detail"),
    [
        ((plain(429, b'{"error":"busy"}'),), "HTTP 429", '{"error":"busy"}'),
        ((plain(200, b'{"choices":[]}'),), "stream without its end", '{"choices":[]}'),
        ((stream(event("a"), done=b""),), "stream without its end", ""),
        ((HEAD, chunk(event("a"))), "connection closed", ""),
        ((), "connection closed", ""),
        ((b"SSH-2.0\r\n",), "not HTTP", ""),
        ((stream(b"data: {oops\n\n"),), "event that is not JSON", "{oops"),
        ((stream(b"data: [1]\n\n"),), "event that is not an object", "[1]"),
        ((stream(event("a"), b'data: {"error":{"message":"gone"}}\n\n'),), "error event", "gone"),
        ((HEAD, chunk(b"data: " + b"x" * (1 << 20) + b"xx")), "line without an end", ""),
    ],
)
async def test_what_goes_wrong_has_a_name_and_its_first_words(pieces, error, detail):
    answer = await answered(*pieces)
    assert answer.error == error
    assert detail in answer.detail
    assert len(answer.detail) <= 300


async def test_nobody_listening_is_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    answer = Answer()
    await asyncio.wait_for(ask(Target("127.0.0.1", port), b"", answer, lambda: 0.0), 5)
    assert (answer.error, answer.status) == ("no connection", None)


async def test_a_request_that_is_given_up_closes_its_connection():
    async with endpoint(lambda number: None) as served:
        asking = asyncio.ensure_future(ask(served.target, served.target.request("/v1", b"{}"), Answer(), lambda: 0.0))
        while not served.requests:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait_for(served.hung_up.wait(), 5)


async def test_a_request_names_host_key_and_length():
    async with endpoint(lambda number: [stream(event())]) as served:
        await ask(served.target, served.target.request("/v1/completions", b'{"n":1}'), Answer(), lambda: 0.0)
    head, body = served.requests[0]
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert f"host: 127.0.0.1:{served.target.port}" in head
    assert "authorization: Bearer secret" in head
    assert body == {"n": 1}


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://llm.example/team/v1", "https://llm.example:443/team"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_an_endpoint_is_found_from_its_url(url, origin):
    assert parse_target(url).origin == origin


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x?y"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(UserError, match="not the URL of an endpoint"):
        parse_target(url)


def test_the_first_thing_that_went_wrong_stays():
    answer = Answer()
    answer.fail("one", "x" * 1000)
    answer.fail("two")
    assert (answer.error, len(answer.detail)) == ("one", 300)
