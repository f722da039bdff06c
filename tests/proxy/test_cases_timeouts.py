"""Reported failures of the kind: one limit for everything, too short for a long prompt or none where one is due."""

import asyncio
import dataclasses

import pytest

from proxy.config import ProxyConfig, Timeouts
from tests.stand_in.engine import LIMIT_FIELDS, Fault
from tests.stand_in.fault import token
from tests.stand_in.framing import BlackHole

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
STREAM = {**BODY, "stream": True}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
SHORT = 0.1


def forever():
    return asyncio.Event()


def test_the_limits_that_hold_by_default_survive_a_prompt_of_a_million_tokens():  # B27
    defaults = ProxyConfig(endpoints=()).timeouts
    for limit in (defaults.prefill, defaults.headers, defaults.total):
        assert limit is None or limit >= 1800
    assert defaults.connect <= 10
    assert {field.name for field in dataclasses.fields(Timeouts)} >= {"connect", "prefill", "headers", "idle", "total"}


@STREAMS
async def test_each_limit_is_of_its_own_phase_and_504_names_the_leg(make_rig, stream):  # B27
    rig = await make_rig(timeouts=Timeouts(connect=1, prefill=SHORT, headers=SHORT, idle=SHORT), health_interval=30)
    phases = [
        (rig.prefills[0], "prefill", Fault(hold=forever())),
        (rig.prefills[0], "prefill", Fault(hold=forever(), pause_in_body=5)),
        (rig.decodes[0], "decode", Fault(hold=forever())),
    ]
    if not stream:
        phases.append((rig.decodes[0], "decode", Fault(hold=forever(), pause_in_body=5)))
    for engine, leg, fault in phases:
        engine.gone.clear()
        engine.faults = [fault]
        reply = await rig.client.post(CHAT, json={**BODY, "stream": stream})
        assert reply.status_code == 504
        assert reply.json()["error"]["message"].startswith(f"{leg}: ")
        await asyncio.wait_for(engine.gone.wait(), 1)
        assert (await rig.client.post(CHAT, json=BODY)).status_code == 200  # and it counts as no failure in a row
    await rig.idle()


@pytest.mark.parametrize("route", LIMIT_FIELDS)
async def test_pieces_that_keep_coming_may_take_longer_together_than_any_limit_of_a_phase(make_rig, route):  # B27
    rig = await make_rig(timeouts=Timeouts(connect=1, prefill=5, headers=5, idle=0.2))
    rig.decodes[0].tokens = 10
    rig.decodes[0].faults = [Fault(chunk_delay=0.03)]
    began = asyncio.get_running_loop().time()
    reply = await rig.client.post(route, json=STREAM)
    assert asyncio.get_running_loop().time() - began > 0.2
    assert reply.status_code == 200
    assert '"error"' not in reply.text


async def test_a_slow_prefill_may_take_longer_than_any_limit_but_its_own(make_rig):  # B27
    rig = await make_rig(timeouts=Timeouts(connect=SHORT, prefill=5, headers=0.2, idle=SHORT))
    rig.prefills[0].faults = [Fault(delay=0.4)]
    reply = await rig.client.post(CHAT, json=STREAM)
    assert reply.headers["x-pdcluster-path"] == "disaggregated"


async def test_without_limits_an_engine_is_waited_for(make_rig):  # B27
    rig = await make_rig(timeouts=Timeouts(connect=1, prefill=None, headers=None, idle=None, total=None))
    rig.prefills[0].faults, rig.decodes[0].faults = [Fault(delay=0.05)], [Fault(delay=0.05, chunk_delay=0.01)]
    assert (await rig.client.post(CHAT, json=STREAM)).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_engine_that_lets_nobody_connect_is_given_up_after_the_connect_limit(make_rig, leg):  # B27
    rig = await make_rig(timeouts=Timeouts(connect=0.2, prefill=60, headers=60), health_interval=30)
    engine = rig.prefills[0] if leg == "prefill" else rig.decodes[0]
    await engine.stop()
    with BlackHole(engine.port):
        began = asyncio.get_running_loop().time()
        reply = await rig.client.post(CHAT, json=BODY)
        took = asyncio.get_running_loop().time() - began
    assert took < 2
    if leg == "prefill":
        assert reply.headers["x-pdcluster-path"] == "aggregated; reason=no_prefill"
    else:
        assert reply.status_code in (502, 503, 504)


async def test_an_engine_that_accepts_and_says_nothing_is_504(make_rig):  # B27
    rig = await make_rig(timeouts=Timeouts(connect=1, prefill=SHORT), health_interval=30)
    await rig.prefills[0].stop()
    await rig.prefills[0].start(rig.prefills[0].port)
    rig.prefills[0].accepting.clear()
    reply = await rig.client.post(CHAT, json=BODY)
    assert reply.status_code == 504
    assert reply.json()["error"]["message"].startswith("prefill: p0")
    rig.prefills[0].accepting.set()


async def test_a_stream_that_sends_only_comments_is_not_silent(make_rig):  # B27
    rig = await make_rig(timeouts=Timeouts(connect=1, headers=5, idle=0.2))
    events = [token("a"), *[b": keep-alive\n\n"] * 10, b"data: [DONE]\n\n"]
    rig.decodes[0].faults = [Fault(events=events, chunk_delay=0.03)]
    assert (await rig.client.post(CHAT, json=STREAM)).content == b"".join(events)
