"""The open loop: sent when due whatever happened before, timed, bounded, every request accounted for."""

import asyncio

from pdcluster.replay.driver import Driver, Limits, Record
from pdcluster.replay.trace import Arrival


def arrivals(*dues, output=3):
    return [Arrival(due, 10, output, (number,)) for number, due in enumerate(dues)]


class Asked:
    """Notes requests in the order they were sent; `play` says what becomes of each."""

    def __init__(self, play):
        self.sent = []
        self.play = play

    async def __call__(self, request, answer):
        self.sent.append(request)
        await self.play(request, answer)


def answers(clock=None, events=3):
    async def play(request, answer):
        now = asyncio.get_running_loop().time() if clock is None else clock()
        answer.status, answer.complete, answer.events, answer.first, answer.last = 200, True, events, now, now + 0.2

    return play


def driver(ask, limits=None, **more):
    return Driver(
        ask,
        lambda arrival: b"%d" % arrival.blocks[0],
        limits or Limits(timeout=5),
        more.pop("tell", lambda progress: None),
        clock=asyncio.get_running_loop().time,
        **more,
    )


async def test_each_is_sent_when_it_is_due():
    asked = Asked(answers())
    run = await driver(asked).run(arrivals(0.0, 0.05, 0.05, 0.1))
    assert asked.sent == [b"0", b"1", b"2", b"3"]
    assert all(0 <= record.sent - record.due < 0.04 for record in run.records)
    assert [record.due for record in run.records] == [0.0, 0.05, 0.05, 0.1]


async def test_a_request_that_hangs_delays_no_other_and_times_out():
    async def play(request, answer):
        if request == b"0":
            await asyncio.Event().wait()
        await answers()(request, answer)

    run = await driver(Asked(play), Limits(timeout=0.2)).run(arrivals(0.0, 0.02, 0.04))
    assert [record.error for record in run.records] == ["timeout", "", ""]
    assert run.records[0].ended >= 0.2 > run.records[2].ended
    assert run.records[0].ttft is None
    assert run.seconds == run.records[0].ended


async def test_more_than_may_be_in_flight_are_not_sent_and_failed():
    gate = asyncio.Event()

    async def play(request, answer):
        if request == b"1":
            asyncio.get_running_loop().call_later(0.02, gate.set)
        await gate.wait()
        await answers()(request, answer)

    asked = Asked(play)
    run = await driver(asked, Limits(timeout=5, in_flight=2)).run(arrivals(0, 0, 0, 0.05))
    assert asked.sent == [b"0", b"1", b"3"]
    assert [record.error for record in run.records] == ["", "", "not sent: too many in flight", ""]
    assert (run.records[2].sent, run.most_in_flight) == (None, 2)


async def test_the_first_token_counts_from_when_the_request_was_due():
    async def play(request, answer):
        await answers(lambda: 100.5)(request, answer)

    made = Driver(Asked(play), lambda arrival: b"", Limits(), print, clock=lambda: 100.0)
    record = (await made.run(arrivals(0.0))).records[0]
    assert (record.first, record.ttft) == (0.5, 0.5)
    assert record.tpot == 0.2 / 2 or abs(record.tpot - 0.1) < 1e-9
    assert abs(record.seconds - 0.7) < 1e-9


async def test_short_answers_fail_only_where_whole_ones_were_asked_for():
    for whole, error in ((False, ""), (True, "answer too short")):
        run = await driver(Asked(answers(events=2)), Limits(whole_output=whole)).run(arrivals(0.0))
        assert run.records[0].error == error


async def test_tokens_are_what_usage_says_and_else_events():
    async def play(request, answer):
        await answers()(request, answer)
        answer.tokens = 7 if request == b"0" else None

    run = await driver(Asked(play)).run(arrivals(0.0, 0.0))
    assert [record.tokens for record in run.records] == [7, 3]


async def test_an_answer_without_text_failed_and_a_failure_keeps_its_name():
    async def play(request, answer):
        if request == b"1":
            answer.fail("HTTP 500", "boom")

    run = await driver(Asked(play)).run(arrivals(0.0, 0.0))
    assert [(record.error, record.detail) for record in run.records] == [("no text", ""), ("HTTP 500", "boom")]


async def test_progress_is_told_while_requests_run():
    told = []
    heard = asyncio.Event()

    def tell(progress):
        told.append(progress)
        heard.set()

    async def play(request, answer):
        if request == b"0":
            return
        await heard.wait()
        await answers()(request, answer)

    await driver(Asked(play), tell=tell, tell_every=0.02).run(arrivals(0.0, 0.0))
    assert (told[0].sent, told[0].in_flight, told[0].failed) == (2, 1, 1)


async def test_bursts_larger_than_what_is_written_ahead_are_sent_whole():
    asked = Asked(answers())
    run = await driver(asked).run(arrivals(*[0.0] * 100))
    assert (len(asked.sent), len(run.records), run.most_in_flight) == (100, 100, run.most_in_flight)
    assert [record.error for record in run.records] == [""] * 100
    assert run.cpu_seconds >= 0


async def test_an_interrupt_ends_what_is_in_flight():
    started, ended = asyncio.Event(), asyncio.Event()

    async def play(request, answer):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.ensure_future(driver(Asked(play)).run(arrivals(0.0)))
    await asyncio.wait_for(started.wait(), 5)
    running.cancel()
    await asyncio.wait([running], timeout=5)
    assert (running.cancelled(), ended.is_set()) == (True, True)


def test_an_answer_of_one_token_has_no_time_a_token():
    record = Record(0, 0.4, 1.0, 1.0, 1.1, 10, 1, 1, None, None, 200, "", "")
    assert (record.tpot, record.ttft, record.seconds) == (None, 1.0, 1.0)
