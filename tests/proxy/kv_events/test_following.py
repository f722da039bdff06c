"""All publishers of all endpoints."""

import asyncio
import time
from contextlib import asynccontextmanager

import orjson

from proxy.config import EndpointConfig
from proxy.config import KvEventSource as Source
from proxy.endpoints import Endpoint
from proxy.engine_client import EngineReply
from proxy.errors import EngineFailedError
from proxy.kv_events.follower import Patience
from proxy.kv_events.following import Followed, KvEvents
from proxy.scheduling.block_index import BlockIndex, Publisher, pack
from tests.proxy.kv_events.test_follower import until
from tests.stand_in.publisher import StandInPublisher, stored

QUICK = Patience(quiet=0.05, longest=0.2, reply=0.1)
IDS = list(range(4))


class FakeClient:
    """Answers by endpoint name with what is in `answers`: a body, a status or an error."""

    def __init__(self, **answers):
        self.answers = answers
        self.looks = 0

    async def get(self, endpoint, path, limit, headers):
        assert path == "/kv_event_sources"
        self.looks += 1
        answer = self.answers[endpoint.name]
        if isinstance(answer, Exception):
            raise answer
        return EngineReply(answer, {}, b"") if isinstance(answer, int) else EngineReply(200, {}, orjson.dumps(answer))


def endpoint(name):
    return Endpoint(EndpointConfig(name, f"http://{name}:1", "prefill"))


def settings(publisher, **more):
    publish, replay = publisher.addresses
    zmq = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""}
    return {**zmq, "endpoint": publish, "replay_endpoint": replay, **more}


@asynccontextmanager
async def publishers(count):
    made = [await StandInPublisher().start() for _ in range(count)]
    try:
        yield made
    finally:
        for publisher in made:
            await publisher.close()


@asynccontextmanager
async def followed(names, client, again=60.0, **given):
    events = KvEvents(
        Followed([endpoint(name) for name in names], dict.fromkeys(names, ()) | given, QUICK, again, 0.01, 0.05),
        BlockIndex(),
        client,
        b"",
        time.monotonic,
    )
    running = asyncio.create_task(events.run())
    try:
        yield events
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not events.progress()


async def test_ranks_of_several_endpoints_are_found_and_followed():
    async with publishers(3) as (one, two, three):
        client = FakeClient(p0={"0": settings(one), "1": settings(two)}, p1={"0": settings(three)})
        async with followed(("p0", "p1"), client) as events:
            await until(lambda: len(events.progress()) == 3 and all(map(events.exact, events.progress())))
            await two.publish(stored([1], IDS), lost=True)
            await until(lambda: events.index.cached(pack([*IDS, 0])) == {Publisher(0, 1): 4})
            await three.publish(stored([1], IDS), lost=True)
            await until(lambda: events.index.cached(pack([*IDS, 0])) == {Publisher(0, 1): 4, Publisher(1): 4})


async def test_an_endpoint_may_be_told_apart_from_what_it_says():
    async with publishers(1) as (one,):
        publish, replay = one.addresses
        async with followed(("p0",), FakeClient(), p0=(Source(publish, replay),)) as events:
            await until(lambda: events.exact(Publisher(0)))
            assert events.current(Publisher(0))
            assert not events.exact(Publisher(0, 1))
            assert not events.current(Publisher(1))


async def test_engines_that_are_not_there_or_publish_nothing_are_asked_again(caplog):
    caplog.set_level("INFO")
    async with publishers(1) as (one,):
        client = FakeClient(p0=EngineFailedError("refused"), p1=404, p2={}, p3={"0": 1}, p4=500)
        async with followed(client.answers, client) as events:
            await until(lambda: caplog.text.count("KV events:") >= 5)
            for words in ("refused", "not known there", "publishes no KV events", "not a publisher", "answers 500"):
                assert words in caplog.text
            assert not events.progress()
            client.answers.update({name: {"0": settings(one)} for name in client.answers})
            await until(lambda: sum(map(events.exact, events.progress())) == 5)
    assert caplog.text.count("refused") == 1


async def test_an_engine_that_comes_back_elsewhere_is_found():
    async with publishers(2) as (one, two):
        client = FakeClient(p0={"0": settings(one)})
        async with followed(("p0",), client, again=0.05) as events:
            await one.publish(stored([1], IDS), lost=True)
            await until(lambda: events.index.cached(pack([*IDS, 0])))
            client.answers["p0"] = EngineFailedError("busy")
            looks = client.looks
            await until(lambda: client.looks > looks + 2)
            assert events.exact(Publisher(0)), "a look in vain must not end the following"
            client.answers["p0"] = {"0": settings(two)}
            await until(lambda: not events.index.cached(pack([*IDS, 0])))
            await until(lambda: events.exact(Publisher(0)))


async def test_an_address_that_is_none_ends_nothing(caplog):
    caplog.set_level("INFO")
    async with publishers(1) as (one,):
        client = FakeClient(p0={"0": settings(one, endpoint="nonsense")}, p1={"0": settings(one)})
        async with followed(("p0", "p1"), client) as events:
            await until(lambda: events.exact(Publisher(1)))
            await until(lambda: "p0: KV events: Invalid argument" in caplog.text)


async def test_a_bug_ends_nothing_either(caplog):
    async with publishers(1) as (one,):
        client = FakeClient(p0=RuntimeError("bug"), p1={"0": settings(one)})
        async with followed(("p0", "p1"), client) as events:
            await until(lambda: events.exact(Publisher(1)) and "bug while following p0" in caplog.text)
