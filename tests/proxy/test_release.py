"""A client leaves between the legs: decode is asked to make prefill free the KV, which would else wait for its lease.

The request that does this carries the handoff and asks for more tokens than any model makes: vLLM's decode refuses it
and, in doing so, notifies prefill. The stand-in checks its form, and that the handoff was not used before or after.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest

from proxy.config import Timeouts
from tests.stand_in.engine import LIMIT_FIELDS, Fault
from tests.stand_in.framing import BlackHole

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
RELEASED = "pdcluster_handoffs_released_total"
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
PATIENT = {"health_interval": 30, "timeouts": Timeouts(connect=10, prefill=10, headers=10, idle=10)}


@asynccontextmanager
async def left_between_the_legs(rig, route=CHAT, body=BODY):
    """Have a client leave when prefill has answered and decode cannot be reached; decode is back in the block."""
    decode = rig.decodes[0]
    await decode.stop()
    with BlackHole(decode.port) as hole:
        call = asyncio.create_task(rig.client.post(route, json=body))

        async def between():
            return hole.trying > 0

        await rig.until(between)
        assert len(rig.wire.issued) == 1
    await decode.start(decode.port)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    yield
    await rig.idle()


@STREAMS
@pytest.mark.parametrize(("route", "model"), [(CHAT, "m"), ("/v1/completions", "other"), ("/v1/messages", None)])
async def test_a_handoff_whose_client_left_between_the_legs_is_given_back_once(make_rig, route, model, stream):  # B26
    rig = await make_rig(**PATIENT, engine_api_key="engine-secret")
    body = {**BODY, "model": model, "stream": stream}
    async with left_between_the_legs(rig, route, body):

        async def given_back():
            return await rig.metric(RELEASED) == 1

        await rig.until(given_back)
    assert rig.wire.released == list(rig.wire.issued)
    (release,) = rig.decodes[0].releases
    assert release.headers["authorization"] == "Bearer engine-secret"
    assert rig.decodes[0].requests == []
    # It is no request of a client, and no sign of ill health.
    assert await rig.metric("pdcluster_requests_total") == 1
    assert await rig.metric("pdcluster_requests_total", outcome="client_cancelled") == 1
    assert await rig.metric("pdcluster_endpoint_state", endpoint="d0", state="ready") == 1


async def test_a_release_that_cannot_be_delivered_is_not_tried_for_ever_and_disturbs_nobody(make_rig):  # B26
    rig = await make_rig(**PATIENT)
    decode = rig.decodes[0]
    async with left_between_the_legs(rig):
        await decode.stop()
    await decode.start(decode.port)
    assert len(decode.releases) <= 1
    assert (await rig.client.get("/health")).status_code == 200
    assert await rig.metric("pdcluster_requests_total", outcome="client_cancelled") == 1


async def test_wherever_between_prefills_bytes_a_client_leaves_no_handoff_stays(shared):  # B26
    # Whether the client is gone just before or just after prefill's last byte is a race: either the prefill is cut
    # short, and vLLM frees the KV itself, or the handoff is used, or it is given back.
    prefill = shared.prefills[0]
    for round_ in range(24):
        route, last = list(LIMIT_FIELDS)[round_ % 4], asyncio.Event()
        prefill.arrived.clear()
        prefill.faults = [Fault(hold=last, pause_in_body=1)]
        call = asyncio.create_task(shared.client.post(route, json={**BODY, "stream": round_ % 8 > 3}))
        await asyncio.wait_for(prefill.arrived.wait(), 5)
        last.set()
        for _ in range(round_ // 8):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await shared.idle()

    async def none_stays():
        cut = {seen.headers["x-request-id"] for seen in prefill.requests if seen.left is not None}
        left = shared.wire.issued.keys() - shared.wire.used
        return not [handoff for handoff in left if shared.wire.issued[handoff] not in cut]

    await shared.until(none_stays)


async def test_a_handoff_that_decode_took_or_refused_is_not_given_back(shared):  # B01, B26
    before = len(shared.wire.released)
    refused = b'{"error":{"message":"too long","code":400}}'
    shared.decodes[0].faults = [Fault(), Fault(status=400, body=refused), Fault(status=500), Fault()]
    for stream in (False, True, True):
        await shared.client.post(CHAT, json={**BODY, "stream": stream})
        await shared.ready()
    assert len(shared.wire.released) == before
    assert shared.decodes[0].releases == []
