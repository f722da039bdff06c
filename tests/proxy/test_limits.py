"""Time limits, the lease of a handoff, and which failures count against an endpoint."""

import asyncio

import pytest

from proxy.config import Timeouts
from tests.stand_in.engine import Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}


async def state(rig, name):
    for value in ("unknown", "ready", "unhealthy"):
        if await rig.metric("pdcluster_endpoint_state", endpoint=name, state=value) == 1:
            return value
    return None


async def test_a_handoff_nearly_as_old_as_its_lease_is_dropped_and_prefilled_again_never_sent(make_rig):
    rig = await make_rig(lease_seconds=0)
    reply = await rig.client.post(CHAT, json=BODY)
    assert reply.status_code == 502
    assert "lease is nearly over" in reply.json()["error"]["message"]
    assert (len(rig.prefills[0].requests), len(rig.decodes[0].requests)) == (2, 0)
    assert await rig.metric("pdcluster_retries_total", leg="lease") == 1
    assert await rig.metric("pdcluster_handoffs_stranded_total") == 2
    assert await state(rig, "d0") == "ready"


async def test_a_first_event_may_take_longer_than_the_pause_between_events(make_rig):
    rig = await make_rig(timeouts=Timeouts(connect=1, headers=10, idle=0.1))
    late = asyncio.Event()
    rig.decodes[0].faults = [Fault(hold=late, pause_after=0)]
    asyncio.get_running_loop().call_later(0.5, late.set)
    reply = await rig.client.post(CHAT, json=STREAM)
    assert reply.status_code == 200
    assert reply.text.endswith("data: [DONE]\n\n")


async def test_a_first_event_that_never_comes_is_504(make_rig):
    rig = await make_rig(timeouts=Timeouts(connect=1, headers=0.1))
    rig.decodes[0].faults = [Fault(hold=asyncio.Event(), pause_after=0)]
    reply = await rig.client.post(CHAT, json=STREAM)
    assert reply.status_code == 504
    assert reply.json()["error"]["message"] == "decode: d0 gave nothing for 0.1 s"
    assert len(rig.prefills[0].requests) == 1
    await rig.idle()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_the_total_limit_is_504_on_either_leg_and_no_endpoint_is_blamed(make_rig, leg):
    rig = await make_rig(timeouts=Timeouts(connect=1, total=0.2), health_interval=30)
    engine = rig.prefills[0] if leg == "prefill" else rig.decodes[0]
    engine.faults = [Fault(hold=asyncio.Event())] * 3
    for _ in range(3):
        reply = await rig.client.post(CHAT, json=BODY)
        assert reply.status_code == 504
        assert "was not done within the request's 0.2 s" in reply.json()["error"]["message"]
    assert await state(rig, "p0") == await state(rig, "d0") == "ready"


async def test_the_total_limit_ends_a_stream_with_an_error_event(make_rig):
    rig = await make_rig(timeouts=Timeouts(connect=1, total=0.3))
    rig.decodes[0].faults = [Fault(hold=asyncio.Event(), pause_after=3)]
    reply = await rig.client.post(CHAT, json=STREAM)
    assert reply.status_code == 200
    assert "within the request's 0.3 s" in reply.text
    assert "[DONE]" not in reply.text
    assert await rig.metric("pdcluster_requests_total", outcome="upstream_aborted") == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_full_engine_is_not_an_ill_one_and_its_answer_is_passed_on(make_rig, stream):
    rig = await make_rig(health_interval=30)
    full = Fault(status=503, body=b'{"error":{"message":"full"}}', headers={"retry-after": "9"})
    rig.decodes[0].faults = [full] * 4
    for _ in range(2):
        reply = await rig.client.post(CHAT, json={**BODY, "stream": stream})
        assert (reply.status_code, reply.content) == (503, full.body)
        assert reply.headers["retry-after"] == "9"
    assert await state(rig, "d0") == "ready"
    assert await rig.metric("pdcluster_requests_total", outcome="unavailable") == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_engine_that_answers_500_is_out_until_a_probe_succeeds(make_rig, stream):
    rig = await make_rig(health_interval=30)
    rig.decodes[0].faults = [Fault(status=500)] * 2
    assert (await rig.client.post(CHAT, json={**BODY, "stream": stream})).status_code == 500
    assert await state(rig, "d0") == "unhealthy"
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 503


async def test_engines_that_close_idle_connections_without_a_word_cost_no_request(rig):
    for engine in rig.prefills + rig.decodes:
        engine.keep_alive = False
    for index in range(12):
        reply = await rig.client.post(CHAT, json=STREAM if index % 2 else BODY)
        assert reply.status_code == 200


async def test_clients_that_leave_mid_stream_leave_no_connection_behind(rig):
    for _ in range(25):
        rig.decodes[0].faults = [Fault(hold=asyncio.Event(), pause_after=3)]
        async with rig.client.stream("POST", CHAT, json=STREAM) as reply:
            await anext(reply.aiter_lines())
    await rig.idle()

    async def few():
        return len(rig.decodes[0].connections) <= 3

    await rig.until(few)


async def test_a_client_that_leaves_a_plain_call_ends_it(rig):
    rig.decodes[0].faults = [Fault(hold=asyncio.Event())]
    call = asyncio.create_task(rig.client.post("/v1/embeddings", json={"input": "x"}))
    await asyncio.wait_for(rig.decodes[0].arrived.wait(), 5)
    call.cancel()
    await asyncio.wait_for(rig.decodes[0].gone.wait(), 1)
    await rig.idle()
    assert await rig.metric("pdcluster_requests_total", route="/v1/embeddings", outcome="client_cancelled") == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_engine_whose_health_lies_costs_no_client_an_error_while_another_one_works(make_rig, stream):
    rig = await make_rig(prefills=2, decodes=2)
    for engine in (rig.prefills[0], rig.decodes[0]):
        engine.faults = [Fault(status=500)] * 99
    for _ in range(12):
        reply = await rig.client.post(CHAT, json={**BODY, "stream": stream})
        assert reply.status_code == 200
