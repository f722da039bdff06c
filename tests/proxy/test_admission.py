"""Requests that wait for an engine: who goes first, who is refused, and what is left of those that leave."""

import asyncio
import json
import random

import pytest

from proxy.admission import Admission, QueueLimits, targets_for
from proxy.api_keys import load_key_file
from proxy.config import EndpointConfig, SchedulingConfig
from proxy.endpoints import Endpoint, Pools
from proxy.request import KINDS, InferenceRequest
from proxy.scheduling.dispatcher import Dispatcher
from proxy.scheduling.job import Targets
from proxy.scheduling.lanes import Lanes
from proxy.scheduling.prefix_index import PrefixIndex
from proxy.scheduling.seats import Rooms
from proxy.scheduling.shared_load import SharedLoad
from proxy.shared_counts import SharedCounts
from tests.stand_in.engine import Fault

PATH = "/v1/completions"
BODY = {"prompt": "hello there", "max_tokens": 4}


class Busy:
    """A rig whose only prefill engine has all that it is given, and keeps it until `release`."""

    def __init__(self, rig):
        self.rig, self.held = rig, asyncio.Event()

    async def __aenter__(self):
        self.engine = self.rig.prefills[0]
        self.engine.always = Fault(hold=self.held)
        self.calls = []
        for count in (1, 2):  # the second is sent once the first is later than forecast
            self.ask()
            await self.has(count)
        return self

    async def has(self, count):
        async def so_many():
            return self.engine.now == count

        await self.rig.until(so_many)

    def ask(self, **headers):
        call = asyncio.create_task(self.rig.client.post(PATH, json=BODY, headers=headers))
        self.calls.append(call)
        return call

    async def waits(self, count):
        async def so_many():
            return await self.rig.metric("pdcluster_queue_length") == count

        await self.rig.until(so_many)

    async def __aexit__(self, *_):
        self.held.set()
        await asyncio.gather(*self.calls, return_exceptions=True)
        await self.waits(0)
        await self.rig.idle()


def keys(tmp_path, **fields):
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({name: {"key": f"secret-of-{name}", **more} for name, more in fields.items()}))
    path.chmod(0o600)
    return load_key_file(path)[0]


async def test_requests_wait_in_the_router_and_not_in_an_engine_that_is_busy(rig):
    async with Busy(rig) as busy:
        for _ in range(5):
            busy.ask()
        await busy.waits(5)
        assert busy.engine.now == 2
    assert [call.result().status_code for call in busy.calls] == [200] * 7
    assert await rig.metric("pdcluster_queue_seconds_count", priority="normal") == 7


async def test_a_request_that_waits_too_long_is_answered_408(make_rig):
    rig = await make_rig(scheduling=SchedulingConfig(queue_seconds=0.2))
    async with Busy(rig) as busy:
        reply = await busy.ask()
        assert reply.status_code == 408
        assert reply.json()["error"]["code"] == "queue_timeout"
        assert await rig.metric("pdcluster_refusals_total", reason="queue_timeout") == 1


async def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_time_to_come_back(rig):
    async with Busy(rig) as busy:
        reply = await busy.ask(**{"x-request-deadline-ms": "50"})
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "overloaded"
        assert int(reply.headers["retry-after"]) >= 1
        assert await rig.metric("pdcluster_refusals_total", reason="deadline") == 1


@pytest.mark.parametrize("value", ["soon", "-1", "0", "1.5", "99999999999"])
async def test_a_deadline_that_is_none_is_a_bad_request(rig, value):
    reply = await rig.client.post(PATH, json=BODY, headers={"x-request-deadline-ms": value})
    assert reply.status_code == 400
    assert "x-request-deadline-ms" in reply.json()["error"]["message"]
    assert rig.prefills[0].requests == []


async def test_a_full_queue_refuses_the_next_request(make_rig):
    rig = await make_rig(scheduling=SchedulingConfig(queue_size=2))
    async with Busy(rig) as busy:
        waiting = [busy.ask() for _ in range(2)]
        await busy.waits(2)
        reply = await busy.ask()
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert await rig.metric("pdcluster_refusals_total", reason="queue_full") == 1
        assert not any(call.done() for call in waiting)


async def test_a_full_queue_sheds_the_lowest_priority_for_a_higher_one(make_rig, tmp_path):
    both = keys(tmp_path, gold={"priority": -1}, bronze={"priority": 5})
    rig = await make_rig(scheduling=SchedulingConfig(queue_size=1), api_keys=both)
    gold, bronze = ({"authorization": f"Bearer secret-of-{name}"} for name in ("gold", "bronze"))
    rig.client.headers.update(gold)
    async with Busy(rig) as busy:
        shed = busy.ask(**bronze)
        await busy.waits(1)
        kept = busy.ask(**gold)
        assert (await shed).status_code == 429
        assert not kept.done()
    assert kept.result().status_code == 200


async def test_of_those_that_wait_the_higher_priority_is_served_first(make_rig, tmp_path):
    both = keys(tmp_path, gold={"priority": -1}, bronze={"priority": 5})
    rig = await make_rig(api_keys=both)
    gold, bronze = ({"authorization": f"Bearer secret-of-{name}"} for name in ("gold", "bronze"))
    rig.client.headers.update(gold)
    order = []
    async with Busy(rig) as busy:
        for name, headers in (("bronze", bronze), ("bronze", bronze), ("gold", gold)):
            busy.ask(**headers).add_done_callback(lambda _, name=name: order.append(name))
        await busy.waits(3)
    assert order[0] == "gold"


async def test_a_client_that_leaves_while_it_waits_costs_no_engine_anything(rig):
    async with Busy(rig) as busy:
        call = busy.ask()
        await busy.waits(1)
        call.cancel()
        await busy.waits(0)
    assert len(busy.engine.requests) == 2


async def test_requests_that_wait_are_served_by_decode_alone_once_no_prefill_is_left(rig):
    async with Busy(rig) as busy:
        call = busy.ask()
        await busy.waits(1)
        await rig.prefills[0].stop()
        reply = await call
    assert reply.status_code == 200
    assert reply.headers["x-pdcluster-path"].startswith("aggregated")


@pytest.mark.parametrize("count", [1, 6])
async def test_however_many_wait_none_waits_on_once_no_pair_is_left(make_rig, count):
    rig = await make_rig(decodes=2)
    async with Busy(rig) as busy:
        waiting = [busy.ask() for _ in range(count)]
        await busy.waits(count)
        await rig.prefills[0].stop()
        replies = await asyncio.gather(*waiting)
    assert [reply.status_code for reply in replies] == [200] * count
    assert {reply.headers["x-pdcluster-path"].partition(";")[0] for reply in replies} == {"aggregated"}


async def test_requests_that_wait_are_answered_503_once_no_decode_is_left(rig):
    async with Busy(rig) as busy:
        waiting = [busy.ask() for _ in range(3)]
        await busy.waits(3)
        await rig.decodes[0].stop()
        replies = await asyncio.gather(*waiting)
    assert [reply.status_code for reply in replies] == [503] * 3


def test_a_keys_target_for_first_tokens_leaves_the_part_for_long_prompts_as_it_is(tmp_path):
    usual = Targets(base=0.5, each=0.001, free=1000)
    quick, plain = keys(tmp_path, quick={"ttft_ms": 100}, plain={})
    assert targets_for(quick, usual) == Targets(base=0.1, each=0.001, free=1000)
    assert targets_for(plain, usual) is targets_for(None, usual) is usual


async def test_the_engine_of_a_request_that_left_as_it_was_placed_goes_to_the_next():
    clock = asyncio.get_running_loop().time
    endpoints = tuple(
        Endpoint(EndpointConfig(name, f"http://{name}", role), counts=SharedCounts(5), column=column)
        for column, (name, role) in enumerate((("p0", "prefill"), ("d0", "decode")))
    )
    pools = Pools(endpoints)
    for endpoint in endpoints:
        pools.probed(endpoint)
    rng = random.Random(1)
    lanes, rooms = Lanes(fixed=60.0, each=0.0), Rooms(rng)
    lanes.add("p0", 0)
    rooms.add("d0")
    dispatcher = Dispatcher(lanes, rooms, PrefixIndex(), rng, Targets())
    admission = Admission(dispatcher, pools, SharedLoad(endpoints, dispatcher, 2), QueueLimits(), None, clock)
    request = InferenceRequest(KINDS[PATH], b"", BODY, {})
    first = await admission.place(request, (), None)
    leaves, stays = (asyncio.create_task(admission.place(request, (), None)) for _ in range(2))
    await asyncio.sleep(0)
    assert not leaves.done()
    admission.prefilled(first, None, well=False)  # its engine is the next one's, who does not know yet
    leaves.cancel()
    async with asyncio.timeout(5):
        assert (await stays).prefill.name == "p0"
