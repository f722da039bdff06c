"""Streams whose events come faster than every few milliseconds are gathered: nothing is lost, order stays, others go first."""

import asyncio
import time

import pytest

from proxy.engine_connection import FAST_S, EngineConnection
from proxy.exchange import Limit

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Transport:
    """Notes whether its socket is read; `reads_again` is set when that begins anew."""

    def __init__(self):
        self.reading, self.closing, self.reads_again = True, False, asyncio.Event()

    def write(self, data):
        pass

    def is_closing(self):
        return self.closing

    def abort(self):
        self.closing = True

    def pause_reading(self):
        self.reading = False
        self.reads_again.clear()

    def resume_reading(self):
        self.reading = True
        self.reads_again.set()


class Sink:
    def __init__(self):
        self.got, self.ended = b"", False

    def feed(self, data):
        self.got += data

    def chunk(self, data, start):
        self.got += data[start:-2]
        return True

    def end(self, error):
        self.ended = error is None


def chunk(text):
    return b"%x\r\n%b\r\n" % (len(text), text)


def event(text):
    """An event in the middle of an answer, as vLLM writes it."""
    return b'data: {"id":"a","choices":[{"text":"%b","finish_reason":null}]}\n\n' % text


def too_fast(connection):
    """Bring two events at once, so that the second makes the stream wait."""
    for _ in range(2):
        connection.data_received(chunk(event(b"e")))


@pytest.fixture
async def stream():
    """A piped stream whose last bytes came long ago."""
    connection, transport, sink = EngineConnection(lambda _: None, lambda _: None), Transport(), Sink()
    connection.connection_made(transport)
    exchange = connection.send(b"GET / HTTP/1.1\r\n\r\n", b"", b"", "decode", "d0")
    connection.data_received(HEAD)
    exchange.pipe(sink, lambda: Limit(None))
    exchange.last -= 1.0
    return connection, transport, sink, exchange


async def test_events_that_come_at_the_pace_of_steps_are_never_held(stream):
    connection, transport, sink, exchange = stream
    for index in range(10):
        connection.data_received(chunk(event(b"%d" % index)))
        assert transport.reading
        exchange.last -= 2 * FAST_S  # as if that much time had passed
    assert sink.got == b"".join(event(b"%d" % index) for index in range(10))


LAST = b'data: {"id":"a","choices":[{"text":"e","finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"a","choices":[],"usage":{"completion_tokens":9}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "ending", [[LAST, USAGE, DONE], [LAST + USAGE, DONE], [event(b"e") + LAST, USAGE + DONE], [LAST]]
)
async def test_the_last_events_of_a_stream_which_come_together_do_not_wait(stream, ending):
    connection, transport, sink, exchange = stream
    exchange.last = time.monotonic()  # just now
    for text in ending:
        connection.data_received(chunk(text))
        assert transport.reading
    assert sink.got == b"".join(ending)


async def test_events_that_keep_coming_at_once_are_passed_on_and_then_the_stream_waits_a_moment(stream):
    connection, transport, sink, _ = stream
    too_fast(connection)
    count = len(sink.got)
    assert not transport.reading
    await asyncio.wait_for(transport.reads_again.wait(), 2)
    connection.data_received(chunk(event(b"3")) + chunk(event(b"4")))
    assert sink.got[count:] == event(b"3") + event(b"4")
    assert not transport.reading  # it was there already: the stream is still too fast


async def test_the_end_of_a_stream_that_was_held_frees_the_connection(stream):
    connection, transport, sink, exchange = stream
    too_fast(connection)
    await asyncio.wait_for(transport.reads_again.wait(), 2)
    connection.data_received(b"0\r\n\r\n")
    assert sink.ended
    assert exchange.complete
    assert transport.reading
    assert connection.usable


async def test_a_slow_client_keeps_a_held_stream_waiting_beyond_the_moment(stream):
    connection, transport, _, exchange = stream
    too_fast(connection)
    exchange.pause()
    began = time.monotonic()
    released = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, released.set)  # well after the moment
    await released.wait()
    assert time.monotonic() - began > 0.02
    assert not transport.reading
    exchange.resume()
    assert transport.reading


async def test_a_held_connection_that_is_cut_stays_cut(stream):
    connection, transport, _, exchange = stream
    too_fast(connection)
    exchange.close()
    assert transport.closing
    released = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, released.set)
    await released.wait()
    assert not transport.reading
