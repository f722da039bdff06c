"""Chunks that pass the parser by: whatever an engine's bytes are cut into, the client gets the same stream."""

import asyncio
import itertools
import random

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from proxy import engine_connection
from proxy.engine_connection import EngineConnection
from proxy.exchange import Limit
from proxy.linked_client import LinkedClient, Turn
from proxy.relay import Relay
from proxy.request import KINDS
from proxy.trace import Trace

ROUTE = "/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def event(text):
    return b'data: {"id":"c","choices":[{"delta":{"content":"%b"}}]}\n\n' % text


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = [event(b"x" * size) for size in (0, 1, 40, 200, 3)]
FIRST, *MORE = EVENTS
STREAM = b"".join(map(chunk, [*MORE, DONE])) + LAST


class Transport:
    """Notes what is written; `closing` as a real one would tell."""

    def __init__(self):
        self.written, self.closing = b"", False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    abort = close

    def pause_reading(self):
        pass

    resume_reading = pause_reading


class CountingRelay(Relay):
    """Counts the chunks that went out as they came."""

    passed = 0

    def takes(self, data, start):
        taken = super().takes(data, start)
        self.passed += taken
        return taken


class Passing:
    """One connection to an engine, and for each request on it a client."""

    def __init__(self):
        self.engine, self.freed = Transport(), 0
        self.connection = EngineConnection(self._free, lambda _: None)
        self.connection.connection_made(self.engine)

    def _free(self, _):
        self.freed += 1

    async def begin(self, head=HEAD, chunked=True):
        """Ask for a stream whose first event is there already, and pipe the rest to a new client."""
        self.client = Transport()
        turn = Turn(self.client, FlowControl(self.client), [], lambda: None, keep_alive=True, expects_100=False)
        client = LinkedClient(turn, chunked=chunked)
        self.trace = Trace(ROUTE, 0.0)
        self.relay = CountingRelay(KINDS[ROUTE], self.trace, lambda: 0.0)
        self.exchange = self.connection.send(b"POST / HTTP/1.1\r\n\r\n", b"", b"", "decode", "d0")
        self.connection.data_received(head)
        await client.start(200, {})
        self.relaying = asyncio.create_task(client.relay(FIRST, self.exchange, lambda: Limit(None), self.relay))
        await asyncio.sleep(0)
        return self

    def bring(self, *pieces):
        for piece in pieces:
            self.exchange.last -= 1.0  # as if the one before had come long ago
            self.connection.data_received(piece)
        return self

    async def body(self):
        """Return what the client got, which must have ended."""
        await asyncio.wait_for(self.relaying, 5)
        _, _, body = self.client.written.partition(b"\r\n\r\n")
        return unchunked(body)

    async def is_whole(self):
        """Check that the client has all of the stream, and that the connection serves another one as quickly."""
        assert await self.body() == b"".join([*EVENTS, DONE])
        assert (self.trace.events, self.trace.complete, self.trace.outcome) == (len(EVENTS) + 1, True, "ok")
        assert not self.engine.closing


def unchunked(body):
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]
        if length == 0:
            assert body == b""
            return b"".join(parts)


def cut(data, *places):
    places = [0, *sorted(places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places) if end > start]


async def test_chunks_that_come_alone_go_out_as_they_came_and_all_others_are_parsed():
    passing = await Passing().begin()
    passing.bring(*map(chunk, MORE))
    assert passing.relay.passed == len(MORE)
    assert passing.client.written.endswith(b"".join(map(chunk, MORE)))
    passing.bring(chunk(DONE) + LAST)
    await passing.is_whole()
    assert passing.relay.passed == len(MORE)


async def test_the_stream_is_the_same_wherever_its_bytes_are_cut():
    passing = Passing()
    for place in range(len(STREAM) + 1):
        await passing.begin()
        passing.bring(*cut(STREAM, place))
        await passing.is_whole()
    assert passing.freed == len(STREAM) + 1  # one connection did for all


async def test_the_stream_is_the_same_however_many_pieces_it_comes_in():
    rng = random.Random(20)
    passing = Passing()
    for index in range(300):
        places = rng.sample(range(len(STREAM)), 1 + index % 40)
        await passing.begin()
        passing.bring(*cut(STREAM, *places))
        await passing.is_whole()


async def test_the_stream_is_the_same_whatever_an_engine_makes_chunks_of():
    text = b"".join([*MORE, DONE])
    passing = Passing()
    for place in range(len(text) + 1):
        await passing.begin()
        passing.bring(*map(chunk, cut(text, place)), LAST)
        await passing.is_whole()
    for place in range(len(MORE) + 1):
        await passing.begin()
        passing.bring(*map(chunk, MORE[:place]), chunk(b"".join([*MORE[place:], DONE])), LAST)
        await passing.is_whole()


async def test_text_in_a_chunk_that_looks_like_a_chunk_is_text():
    passing = await Passing().begin()
    inner = chunk(MORE[0])
    passing.bring(*cut(chunk(inner + DONE), 4, 4 + len(inner)), LAST)
    assert await passing.body() == FIRST + inner + DONE


async def test_bytes_that_come_one_by_one_make_the_same_stream():
    passing = await Passing().begin()
    passing.bring(*(bytes([byte]) for byte in STREAM))
    await passing.is_whole()
    assert passing.relay.passed == 0


@pytest.mark.parametrize("many", [2, 3])
async def test_chunks_that_come_together_are_parsed_and_soon_those_that_come_alone_pass_again(many):
    passing = await Passing().begin()
    passing.bring(b"".join(map(chunk, MORE[:many])))
    assert passing.relay.passed == 0
    passing.bring(*map(chunk, MORE[many:]))
    assert passing.relay.passed == len(MORE[many:]) - 1  # the first is looked at together with what came before
    passing.bring(chunk(DONE), LAST)
    await passing.is_whole()


async def test_the_parser_knows_where_it_is_between_chunks_that_passed_it_and_chunks_in_pieces():
    places = {"alone": 0, "in pieces": 30, "without its last byte": -1}
    for order in itertools.product(places, repeat=len(MORE)):
        passing = await Passing().begin()
        for how, data in zip(order, MORE, strict=True):
            whole = chunk(data)
            before = passing.relay.passed
            passing.bring(*cut(whole, places[how] % len(whole)))
            assert passing.relay.passed - before <= (how == "alone")
        passing.bring(chunk(DONE) + LAST)
        await passing.is_whole()
        assert passing.relay.passed >= len(list(itertools.takewhile("alone".__eq__, order)))


@pytest.mark.parametrize(
    "dress",
    [
        lambda data: b"%X\r\n%b\r\n" % (len(data), data),
        lambda data: b"%x;name=value\r\n%b\r\n" % (len(data), data),
        lambda data: b'%x;a="b c";d\r\n%b\r\n' % (len(data), data),
        lambda data: b"00%x\r\n%b\r\n" % (len(data), data),
    ],
    ids=["upper case", "extension", "quoted extension", "leading zeros"],
)
async def test_a_size_line_in_another_dress_is_the_parsers_and_the_next_chunk_passes(dress):
    lettered = event(b"x" * (0xAF - len(event(b""))))
    assert b"%x" % len(lettered) == b"af"
    for place in range(len(dress(lettered)) + 1):
        passing = await Passing().begin()
        passing.bring(*cut(dress(lettered), place))
        assert passing.relay.passed == 0
        passing.bring(chunk(MORE[0]), chunk(MORE[1]), chunk(DONE), LAST)
        assert await passing.body() == b"".join([FIRST, lettered, MORE[0], MORE[1], DONE])
        assert passing.relay.passed >= 1
        assert passing.freed == 1


def wrong(size, data=MORE[1]):
    return b"%b\r\n%b\r\n" % (size, data)


LENGTH = len(MORE[1])


@pytest.mark.parametrize(
    "bad",
    [
        wrong(b"zz"),
        wrong(b"-%x" % LENGTH),
        wrong(b"0x%x" % LENGTH),
        wrong(b" %x" % LENGTH),
        wrong(b"%x.0" % LENGTH),
        wrong(b""),
        wrong(b"%x" % (LENGTH - 1)),
        wrong(b"%x" % (LENGTH + 1)),
        wrong(b"f" * 17),
        b"no chunk" + event(b"x" * (262 - 8 - 2 - len(event(b"")))) + b"\r\n",
    ],
    ids=["letters", "negative", "prefix", "blank", "fraction", "none", "too small", "too large", "overflow", "words"],
)
@pytest.mark.parametrize("in_two", [False, True], ids=["in one", "in two"])
async def test_a_size_that_is_none_or_wrong_ends_the_stream_with_an_error_and_the_connection(bad, in_two):
    passing = await Passing().begin()
    passing.bring(chunk(MORE[0]))
    passing.bring(*cut(bad, 9 if in_two else 0))
    assert passing.engine.closing
    assert passing.freed == 0
    body = await passing.body()
    assert body.startswith(FIRST + MORE[0])
    assert b"what it sent is not HTTP" in body
    assert b"[DONE]" not in body
    if not in_two:
        assert b"x" * 40 not in body  # nothing of what came with the wrong size
    assert passing.trace.outcome == "upstream_aborted"


@pytest.mark.parametrize(
    "end", [LAST, b"000\r\n\r\n", b"0;last\r\n\r\n", b"0\r\nx-a: b\r\n\r\n", b"0\r\nx-a: b\r\nx-c:\r\n\r\n"], ids=str
)
async def test_the_last_chunk_and_trailers_end_the_stream_and_free_the_connection_wherever_they_are_cut(end):
    passing = Passing()
    for place in range(len(end) + 1):
        await passing.begin()
        passing.bring(*map(chunk, MORE), chunk(DONE))
        assert passing.relay.passed == len(MORE)  # also after the trailers of the answer before
        pieces = cut(end, place)
        passing.bring(*pieces[:-1])
        assert not passing.exchange.complete
        passing.bring(pieces[-1])
        await passing.is_whole()
        assert passing.freed == place + 1


async def test_a_chunk_after_the_last_one_is_nobodys():
    passing = await Passing().begin()
    passing.bring(*map(chunk, MORE), chunk(DONE) + LAST + chunk(event(b"evil")))
    assert b"evil" not in await passing.body()
    assert passing.engine.closing


@pytest.mark.parametrize("framing", [b"", b"content-length: %d\r\n"], ids=["until close", "length"])
@pytest.mark.parametrize("before", [[], [b": a line end\r\n"]], ids=["first", "later"])
async def test_a_body_without_chunks_that_looks_like_some_is_kept_to_the_byte(framing, before):
    body = [*before, chunk(MORE[0]), DONE]
    lines = framing % len(b"".join(body)) if framing else b""
    passing = await Passing().begin(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + lines + b"\r\n")
    passing.bring(*body)
    if not framing:
        passing.connection.connection_lost(None)
    assert await passing.body() == FIRST + b"".join(body)


async def test_a_client_without_chunks_gets_events_without_sizes():
    passing = await Passing().begin(chunked=False)
    passing.bring(*map(chunk, MORE), chunk(DONE), LAST)
    await asyncio.wait_for(passing.relaying, 5)
    assert passing.client.written.partition(b"\r\n\r\n")[2] == b"".join([*EVENTS, DONE])
    assert passing.client.closing


def test_size_lines_are_known_for_every_chunk_that_may_pass_and_for_nothing_else():
    known = {}
    for length in range(1, engine_connection._LONGEST_CHUNK):
        whole = chunk(b"x" * length)
        if len(whole) < engine_connection._LONGEST_CHUNK:
            known[len(whole)] = whole[: -length - 2]
    for size in range(engine_connection._LONGEST_CHUNK):
        line = engine_connection._SIZE_LINES[size]
        if size in known:
            assert line == known[size]
        else:
            assert len(line) > size  # nothing of that size begins with it
