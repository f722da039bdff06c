"""HTTP to engines over real sockets: framing, keep-alive, the one safe retry, time limits, back-pressure."""

import asyncio
import gzip
from contextlib import asynccontextmanager

import pytest

from proxy.config import EndpointConfig, Timeouts
from proxy.endpoints import Endpoint
from proxy.engine_client import EngineClient, EngineRequest
from proxy.errors import EngineFailedError, EngineTimeoutError
from proxy.exchange import Limit

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    """Answers each request with the next script: bytes to send, None to close, "reset", or an event to wait for."""

    def __init__(self, scripts):
        self.scripts, self.connections, self.requests, self.closed = list(scripts), 0, 0, asyncio.Event()

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                self.requests += 1
                for step in self.scripts.pop(0):
                    if isinstance(step, bytes):
                        writer.write(step)
                        await writer.drain()
                    elif step == "reset":
                        writer.transport.abort()
                        return
                    elif step is None:
                        return
                    else:
                        await step.wait()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()


@asynccontextmanager
async def engine_and_client(*scripts, connect=2.0):
    engine = Engine(scripts)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EngineClient(Timeouts(connect=connect))
    try:
        yield engine, client, Endpoint(EndpointConfig("d0", f"http://127.0.0.1:{port}", "decode"))
    finally:
        client.close()
        server.close()
        for _ in range(3):
            await asyncio.sleep(0)


async def ask(client, endpoint, *, limit=5.0, body=b"{}", replayable=False):
    request = EngineRequest("/v1/completions", body, b"x-a: b\r\n", replayable=replayable)
    return await client.call(endpoint, request, leg="decode", limit=Limit(limit))


@pytest.mark.parametrize(
    ("script", "body"),
    [
        ([OK], b"ok"),
        ([CHUNKED + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"], b"abcde"),
        ([bytes([byte]) for byte in CHUNKED + b"3\r\nabc\r\n0\r\n\r\n"], b"abc"),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil the end", None], b"until the end"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK], b"ok"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        (
            [
                b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b"
                % (len(gzip.compress(b"zip" * 99)), gzip.compress(b"zip" * 99))
            ],
            b"zip" * 99,
        ),
    ],
    ids=["length", "chunked", "byte by byte", "until close", "interim", "no content", "gzip"],
)
async def test_each_framing_gives_the_whole_body(script, body):
    async with engine_and_client(script) as (_, client, endpoint):
        assert (await ask(client, endpoint)).body == body


async def test_a_connection_is_used_again_once_its_answer_is_complete():
    async with engine_and_client(*[[OK]] * 5) as (engine, client, endpoint):
        for _ in range(5):
            await ask(client, endpoint)
        assert (engine.connections, engine.requests, client.connections()) == (1, 5, 1)


async def test_concurrent_requests_never_share_a_connection():
    gate = asyncio.Event()
    async with engine_and_client(*[[gate, OK]] * 8) as (engine, client, endpoint):
        calls = [asyncio.create_task(ask(client, endpoint)) for _ in range(8)]
        async with asyncio.timeout(5):
            while engine.requests < 8:
                await asyncio.sleep(0.01)
        gate.set()
        assert [(await call).body for call in calls] == [b"ok"] * 8
        assert engine.connections == 8


@pytest.mark.parametrize(
    "first",
    [
        [OK + b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"],
        [OK + b"garbage"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok and too much"],
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"],
    ],
    ids=["second answer", "garbage", "length too short", "connection close"],
)
async def test_a_connection_that_said_too_much_or_goodbye_is_not_used_again(first):
    async with engine_and_client(first, [OK]) as (engine, client, endpoint):
        assert [(await ask(client, endpoint)).body for _ in range(2)] == [b"ok", b"ok"]
        assert engine.connections == 2


@pytest.mark.parametrize("how", [None, "reset"], ids=["closed", "reset"])
async def test_a_reused_connection_that_breaks_before_any_byte_is_retried_once_where_that_is_safe(how):
    async with engine_and_client([OK], [how], [OK], [OK], [how], [how]) as (engine, client, endpoint):
        for _ in range(3):
            assert (await ask(client, endpoint, replayable=True)).body == b"ok"
        assert engine.connections == 2
        with pytest.raises(EngineFailedError, match="decode: d0 broke off"):
            await ask(client, endpoint, replayable=True)
        assert engine.scripts == []


@pytest.mark.parametrize(
    "scripts", [[[OK], ["reset"], [OK]], [["reset"], [OK]], [[OK], [b"HTTP/1.1 2", "reset"], [OK]]], ids=len
)
async def test_what_may_have_been_delivered_is_not_sent_again(scripts):
    """Not a handoff on a reused connection, nothing on a fresh one, nothing after the first byte of an answer."""
    handoff = scripts[1] == ["reset"]
    async with engine_and_client(*scripts) as (engine, client, endpoint):
        if len(scripts) == 3:
            await ask(client, endpoint)
        with pytest.raises(EngineFailedError, match="broke off"):
            await ask(client, endpoint, replayable=not handoff)
        assert len(engine.scripts) == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", None], "the connection closed"),
        ([CHUNKED + b"5\r\nab", None], "the connection closed"),
        ([CHUNKED + b"zz\r\n"], "not HTTP"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not HTTP"),
        ([b"HTTP/1.1 101 Go On\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n\x00\x00"], "not HTTP"),
        ([b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 4\r\n\r\nnope"], "nobody asked for"),
        ([b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope"], "decompressed"),
    ],
)
async def test_an_answer_that_is_cut_or_nonsense_is_an_error_with_a_reason(script, words, caplog):
    async with engine_and_client(script) as (_, client, endpoint):
        with pytest.raises(EngineFailedError, match=words):
            await ask(client, endpoint)
        assert client.connections() <= 1
        await asyncio.sleep(0)
    assert caplog.text == ""


async def test_a_refused_connection_is_told_from_one_that_broke():
    client = EngineClient(Timeouts(connect=1))
    with pytest.raises(EngineFailedError) as refused:
        await ask(client, Endpoint(EndpointConfig("d0", "http://127.0.0.1:9", "decode")))
    assert refused.value.refused


@pytest.mark.parametrize(
    ("limit", "words", "counts"),
    [
        (Limit(0.05), "gave nothing for 0.05 s", True),
        (Limit(0.05, 60), "was not done within the request's 60 s", False),
    ],
    ids=["phase", "total"],
)
@pytest.mark.parametrize("begun", [False, True], ids=["before headers", "in the body"])
async def test_a_timeout_says_which_limit_it_was_blames_only_for_the_engines_own_and_closes(
    begun, limit, words, counts
):
    script = [CHUNKED + b"1\r\na\r\n"] if begun else []
    async with engine_and_client([*script, asyncio.Event()]) as (_, client, endpoint):
        with pytest.raises(EngineTimeoutError, match=words) as caught:
            await client.call(endpoint, EngineRequest("/p", b"{}", b""), leg="prefill", limit=limit)
        assert (caught.value.counts, caught.value.status) == (counts, 504)
        async with asyncio.timeout(1):
            while client.connections():
                await asyncio.sleep(0.01)


class Collector:
    def __init__(self):
        self.data, self.ended = b"", asyncio.get_running_loop().create_future()

    def feed(self, data):
        self.data += data

    def chunk(self, data, start):
        if not data.endswith(b"\r\n"):
            return False
        self.data += data[start:-2]
        return True

    def end(self, error):
        self.ended.set_result(error)


async def opened(client, endpoint):
    return await client.open(endpoint, EngineRequest("/p", b"{}", b""), leg="decode", limit=Limit(5))


async def test_a_piped_stream_goes_to_its_sink_what_had_come_before_first():
    go = asyncio.Event()
    async with engine_and_client([CHUNKED + b"1\r\na\r\n", go, b"1\r\nb\r\n0\r\n\r\n"], [OK]) as (
        engine,
        client,
        endpoint,
    ):
        exchange = await opened(client, endpoint)
        sink = Collector()
        exchange.pipe(sink, lambda: Limit(5))
        go.set()
        assert await sink.ended is None
        exchange.close()
        assert sink.data == b"ab"
        await ask(client, endpoint)
        assert engine.connections == 1


async def test_a_piped_stream_that_falls_silent_ends_with_a_timeout():
    async with engine_and_client([CHUNKED + b"1\r\na\r\n", asyncio.Event()]) as (_, client, endpoint):
        exchange = await opened(client, endpoint)
        sink = Collector()
        exchange.pipe(sink, lambda: Limit(0.05))
        assert "gave nothing for 0.05 s" in str(await asyncio.wait_for(sink.ended, 2))


async def test_time_in_which_the_client_makes_the_engine_wait_is_not_held_against_it():
    more = asyncio.Event()
    async with engine_and_client([CHUNKED + b"1\r\na\r\n", more, b"0\r\n\r\n"]) as (_, client, endpoint):
        exchange = await opened(client, endpoint)
        sink = Collector()
        exchange.pipe(sink, lambda: Limit(0.1))
        exchange.pause()
        await asyncio.sleep(0.3)
        assert not sink.ended.done()
        exchange.resume()
        more.set()
        assert await sink.ended is None


@pytest.mark.parametrize("piped", [False, True])
async def test_a_reader_that_stops_makes_the_engine_stop_and_holds_little(piped):
    megabyte = b"%x\r\n" % (1 << 20) + b"x" * (1 << 20) + b"\r\n"
    done = asyncio.Event()

    class Marked:
        async def wait(self):
            done.set()

    async with engine_and_client([CHUNKED, *[megabyte] * 64, Marked()]) as (_, client, endpoint):
        exchange = await opened(client, endpoint)
        if piped:
            exchange.pipe(Collector(), lambda: Limit(5))
            exchange.pause()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(done.wait(), 0.3)
        held = sum(map(len, exchange._pieces))
        assert held < 4 << 20
        exchange.close()


async def test_idle_connections_are_closed_after_a_while(monkeypatch):
    monkeypatch.setattr("proxy.engine_client._KEEPALIVE_S", 0.0)
    async with engine_and_client([OK], [OK]) as (engine, client, endpoint):
        await ask(client, endpoint)
        await ask(client, endpoint)
        assert engine.connections == 2


def test_a_line_break_in_a_clients_header_makes_no_header_of_its_own():
    from proxy.firewall import Authorization, headers_for_engine

    lines = headers_for_engine({b"accept": b"a\r\nx-evil: 1", b"authorization": b"b\nc"}, "id", Authorization())
    assert lines == b"x-request-id: id\r\naccept-encoding: identity\r\n"
