"""Following one publisher over real sockets: gaps, restarts, silence, nonsense."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from proxy.config import KvEventSource as Source
from proxy.kv_events.feed import Feed
from proxy.kv_events.follower import Follower, Patience
from proxy.scheduling.block_index import BlockIndex, Publisher, pack
from tests.stand_in.publisher import StandInPublisher, batch, cleared, removed, stored

P0 = Publisher(0)
QUICK = Patience(quiet=0.05, longest=0.2, reply=0.1)


async def until(condition, limit=5.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.005)


@pytest.fixture
async def publisher():
    made = await StandInPublisher().start()
    yield made
    await made.close()


class Run:
    def __init__(self, follower, index):
        self.follower, self.index = follower, index

    @property
    def progress(self):
        return self.follower.progress

    def cached(self, ids):
        return self.index.cached(pack([*ids, 0])).get(P0, 0)


@asynccontextmanager
async def following(publisher, replay=True, patience=QUICK, topic=""):
    index = BlockIndex()
    context = zmq.asyncio.Context()
    publish, replay_address = publisher.addresses
    source = Source(publish, replay_address if replay else None, topic)
    follower = Follower(source, Feed(index, P0), context, time.monotonic, patience)
    running = asyncio.create_task(follower.run())
    try:
        yield Run(follower, index)
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(context._sockets) == 0
        context.destroy(linger=0)
    assert not index.cached(pack(range(100))), "what nobody follows must not be believed"


async def subscribed(run, publisher):
    """Publish until it arrives: a subscription takes a moment."""

    async def knock():
        while run.follower._live < 0:
            await publisher.publish(cleared())
            await asyncio.sleep(0.01)

    await asyncio.wait_for(knock(), 5)
    await publisher.publish(cleared())
    await until(lambda: run.follower._live == publisher.number - 1)


async def test_what_was_published_before_is_replayed(publisher):
    for first in range(3):
        await publisher.publish(stored([first], [first] * 4), lost=True)
    async with following(publisher) as run:
        await until(lambda: run.progress.batches == 3)
        assert [run.cached([first] * 4) for first in range(3)] == [4, 4, 4]
        assert run.progress.complete
        assert run.follower.current


async def test_an_engine_that_published_nothing_yet_is_known_completely(publisher):
    async with following(publisher) as run:
        await until(lambda: run.progress.complete)
        assert run.progress.batches == 0


async def test_live_events_are_applied_in_order(publisher):
    async with following(publisher) as run:
        await subscribed(run, publisher)
        await publisher.publish(stored([1, 2], list(range(8))))
        await until(lambda: run.cached(range(8)) == 8)
        await publisher.publish(stored([3], list(range(8, 12)), parent=2), removed([3]))
        await publisher.publish(removed([2]))
        await until(lambda: run.cached(range(12)) == 4)
        await publisher.publish(cleared())
        await until(lambda: run.cached(range(12)) == 0)
        assert (run.progress.gaps, run.progress.restarts, run.progress.garbage) == (0, 0, 0)


async def test_a_gap_is_closed_by_a_replay(publisher):
    async with following(publisher, patience=Patience(quiet=60)) as run:
        await subscribed(run, publisher)
        before = run.progress.batches
        await publisher.publish(stored([1], list(range(4))), lost=True)
        await publisher.publish(stored([2], list(range(4, 8)), parent=1), lost=True)
        await publisher.publish(stored([3], list(range(8, 12)), parent=2))
        await until(lambda: run.cached(range(12)) == 12)
        assert run.progress.gaps == 1
        assert run.progress.batches == before + 3
        assert run.progress.complete


async def test_what_is_lost_in_silence_is_found_by_asking(publisher):
    async with following(publisher) as run:
        await subscribed(run, publisher)
        await publisher.publish(stored([1], list(range(4))), lost=True)
        await until(lambda: run.cached(range(4)) == 4)


async def test_a_replay_that_loses_some_is_asked_for_again(publisher):
    publisher.at_most = 3
    for first in range(10):
        await publisher.publish(stored([first], [first] * 4), lost=True)
    async with following(publisher, patience=Patience(quiet=60)) as run:  # nothing but the first look can do it
        await until(lambda: run.progress.batches == 10)
        assert all(run.cached([first] * 4) == 4 for first in range(10))
        assert run.progress.complete
        assert publisher.asked[:4] == [0, 2, 4, 6]


async def test_a_buffer_that_does_not_reach_back_leaves_it_incomplete():
    publisher = await StandInPublisher(keep=2).start()
    for first in range(5):
        await publisher.publish(stored([first], [first] * 4), lost=True)
    async with following(publisher) as run:
        await until(lambda: run.progress.batches == 2)
        assert not run.progress.complete
        assert [run.cached([first] * 4) for first in range(5)] == [0, 0, 0, 4, 4]
    await publisher.close()


async def test_a_gap_that_cannot_be_closed_forgets_what_may_have_been_removed():
    publisher = await StandInPublisher(keep=1).start()
    async with following(publisher, patience=Patience(quiet=60)) as run:
        await subscribed(run, publisher)
        await publisher.publish(stored([1], list(range(4))))
        await until(lambda: run.cached(range(4)) == 4)
        await publisher.publish(removed([1]), lost=True)
        await publisher.publish(stored([2], [7] * 4), lost=True)
        await publisher.publish(stored([3], [8] * 4))
        await until(lambda: run.cached([8] * 4) == 4)
        assert run.cached(range(4)) == 0
        assert not run.progress.complete
    await publisher.close()


@pytest.mark.parametrize("batches", [0, 1, 2, 40])
async def test_a_restarted_engine_begins_anew(publisher, batches):
    async with following(publisher) as run:
        await subscribed(run, publisher)
        await publisher.publish(stored([1], list(range(4))))
        await until(lambda: run.cached(range(4)) == 4)
        await publisher.restart(*(batch(stored([number], [50 + number] * 4)) for number in range(batches)))
        await until(lambda: run.cached(range(4)) == 0)
        await publisher.publish(stored([99], [40] * 4), lost=True)
        await until(lambda: run.cached([40] * 4) == 4)
        assert all(run.cached([50 + number] * 4) == 4 for number in range(batches))
        assert run.progress.restarts >= 1
        assert run.progress.complete


async def test_a_restart_is_seen_by_numbers_where_nothing_can_be_replayed(publisher):
    async with following(publisher, replay=False) as run:
        await subscribed(run, publisher)
        await publisher.publish(stored([1], list(range(4))))
        await publisher.publish(stored([2], list(range(4, 8)), parent=1))
        await until(lambda: run.cached(range(8)) == 8)
        await publisher.send_raw(b"", (0).to_bytes(8, "big"), batch(stored([9], [9] * 4)))
        await until(lambda: run.cached([9] * 4) == 4)
        assert run.cached(range(8)) == 0


async def test_a_gap_without_replays_begins_anew(publisher):
    async with following(publisher, replay=False) as run:
        await subscribed(run, publisher)
        await publisher.publish(stored([1], list(range(4))))
        await until(lambda: run.cached(range(4)) == 4)
        await publisher.publish(stored([2], [7] * 4), lost=True)
        await publisher.publish(stored([3], [8] * 4))
        await until(lambda: run.cached([8] * 4) == 4)
        assert run.cached(range(4)) == 0
        assert not run.progress.complete
        assert run.progress.gaps >= 1


async def test_silence_makes_it_stale_and_an_answer_mends_that(publisher):
    async with following(publisher) as run:
        await until(lambda: run.follower.current)
        publisher.answers = False
        await until(lambda: not run.follower.current)
        publisher.answers = True
        await until(lambda: run.follower.current)


async def test_an_engine_that_nobody_has_started_is_waited_for(publisher):
    await publisher.stop()
    async with following(publisher) as run:
        await until(lambda: run.follower._misses >= 2)
        assert not run.follower.current
        await publisher.start()
        await publisher.publish(stored([1], list(range(4))))
        await until(lambda: run.cached(range(4)) == 4)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"\x00"],
        [b"", b"short", b"x"],
        [b"", b"\xff" * 8, b""],
        [b"", b"\x00" * 8, b"x", b"more"],
    ],
)
async def test_messages_of_another_form_are_counted_and_passed_over(publisher, frames):
    async with following(publisher) as run:
        await subscribed(run, publisher)
        await publisher.send_raw(*frames)
        await publisher.publish(stored([1], list(range(4))))
        await until(lambda: run.cached(range(4)) == 4)
        assert run.progress.garbage == 1
        assert run.progress.complete


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", b"garbage" * 999, batch({"type": "BlockStored"}), batch(7)])
async def test_a_batch_that_cannot_be_read_leaves_the_index_incomplete(publisher, payload):
    async with following(publisher) as run:
        await subscribed(run, publisher)
        await publisher.publish(payload=payload)
        await publisher.publish(stored([1], list(range(4))))
        await until(lambda: run.cached(range(4)) == 4)
        assert run.progress.garbage == 1
        assert not run.progress.complete


async def test_only_its_own_topic_is_heard():
    publisher = await StandInPublisher(topic=b"mine").start()
    async with following(publisher, topic="mine") as run:
        await subscribed(run, publisher)
        await publisher.send_raw(b"other", (900).to_bytes(8, "big"), batch())
        await publisher.publish(stored([1], list(range(4))))
        await until(lambda: run.cached(range(4)) == 4)
        assert run.progress.gaps == 0
    await publisher.close()


async def test_a_flood_leaves_other_tasks_their_turn(publisher):
    async with following(publisher) as run:
        await subscribed(run, publisher)
        for number in range(2000):
            await publisher.publish(stored([number], [number] * 4))
        turns = 0
        while run.progress.batches < 2000:
            turns += 1
            await asyncio.sleep(0)
        await until(lambda: run.cached([1999] * 4) == 4)
        assert turns > 10
        assert run.progress.complete
