"""Reported failures of the kind: a wrong idea of which engines work, how loaded they are, and what was counted."""

import asyncio
import json
import re

import pytest

from proxy.config import Timeouts
from tests.stand_in.engine import Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
STREAM = {**BODY, "stream": True}


async def state_of(rig, name):
    for value in ("unknown", "ready", "unhealthy"):
        if await rig.metric("pdcluster_endpoint_state", endpoint=name, state=value) == 1:
            return value
    return None


async def becomes(rig, name, state):
    async def there():
        return await state_of(rig, name) == state

    await rig.until(there)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_statuses_that_say_nothing_of_health_never_take_an_engine_out(make_rig, leg):  # B34
    rig = await make_rig(health_interval=30)
    engine, name = (rig.prefills[0], "p0") if leg == "prefill" else (rig.decodes[0], "d0")
    for status in (400, 401, 403, 404, 413, 422, 429, 503):
        engine.faults = [Fault(status=status, body=b'{"error":{"message":"no"}}')] * 4
        for stream in (False, True):
            await rig.client.post(CHAT, json={**BODY, "stream": stream})
        engine.faults = []
        assert await state_of(rig, name) == "ready", status
    assert (await rig.client.post(CHAT, json=BODY)).headers["x-pdcluster-path"] == "disaggregated"


@pytest.mark.parametrize(
    "answer",
    [Fault(status=500), Fault(status=503), Fault(status=404), Fault(close_before_headers=True), Fault(raw=b"nonsense\r\n\r\n")],
    ids=["500", "503", "404", "closed", "nonsense"],
)  # fmt: skip
async def test_every_way_of_being_ill_takes_an_engine_out_and_every_recovery_brings_it_back(make_rig, answer):  # B35
    rig = await make_rig(decodes=2)
    rig.decodes[0].get_faults["/health"] = answer
    await becomes(rig, "d0", "unhealthy")
    before = len(rig.decodes[0].requests)
    for stream in (False, True) * 4:
        assert (await rig.client.post(CHAT, json={**BODY, "stream": stream})).status_code == 200
    assert len(rig.decodes[0].requests) == before
    rig.decodes[0].get_faults.clear()
    await becomes(rig, "d0", "ready")


async def test_an_engine_that_fails_each_request_is_soon_not_asked_between_probes(make_rig):  # B35
    rig = await make_rig(prefills=2, decodes=2, health_interval=30)
    rig.prefills[0].always = rig.decodes[1].always = Fault(status=500)
    for stream in (False, True) * 10:
        assert (await rig.client.post(CHAT, json={**BODY, "stream": stream})).status_code == 200
    assert (await state_of(rig, "p0"), await state_of(rig, "d1")) == ("unhealthy", "unhealthy")
    assert len(rig.prefills[0].requests) <= 2
    assert len(rig.decodes[1].requests) <= 2


@pytest.mark.parametrize("down", ["prefill", "decode", "both"])
async def test_the_proxy_starts_with_engines_down_and_says_which(make_rig, down):  # B37
    rig = await make_rig(wait=False)
    gone = [engine for engine in rig.prefills + rig.decodes if down in (engine.role, "both")]
    for engine in gone:
        await engine.stop()
    names = [name for name, engine in (("p0", rig.prefills[0]), ("d0", rig.decodes[0])) if engine in gone]
    for name in names:
        await becomes(rig, name, "unhealthy")
    reply = await rig.client.get("/ready")
    assert reply.status_code == 503
    assert [line.split()[0] for line in reply.json()["missing"]] == names
    assert (await rig.client.get("/health")).status_code == 200
    models, chat = await rig.client.get("/v1/models"), await rig.client.post(CHAT, json=BODY)
    assert models.status_code == chat.status_code == (200 if down == "prefill" else 503)
    for engine in gone:
        await engine.start(engine.port)
    await rig.ready()
    assert (await rig.client.post(CHAT, json=BODY)).headers["x-pdcluster-path"] == "disaggregated"


async def test_one_of_three_that_is_down_costs_no_request(make_rig):  # B37
    rig = await make_rig(prefills=3, decodes=3, wait=False)
    await rig.prefills[1].stop()
    await rig.decodes[2].stop()
    for name in ("p1", "d2"):
        await becomes(rig, name, "unhealthy")
    await rig.until(lambda: _is(rig, 200))
    replies = await asyncio.gather(*(rig.client.post(CHAT, json=STREAM) for _ in range(9)))
    assert {reply.headers["x-pdcluster-path"] for reply in replies} == {"disaggregated"}


async def _is(rig, status):
    return (await rig.client.get("/ready")).status_code == status


async def test_models_are_listed_once_each_whatever_one_engine_answers(make_rig):  # B37
    rig = await make_rig(decodes=3, health_interval=30)
    first, second, third = rig.decodes
    first.models, second.models = ["m", "adapter"], ["m"]
    odd = [
        Fault(status=500),
        Fault(close_before_headers=True),
        Fault(body=b"nonsense"),
        Fault(body=b"null"),
        Fault(body=b"[]"),
        Fault(body=b'{"data":null}'),
        Fault(body=b'{"data":[null,{"object":"model"},{"id":["x"]},{"id":"m"}]}'),
    ]
    for fault in odd:
        third.get_faults["/v1/models"] = fault
        reply = await rig.client.get("/v1/models")
        assert reply.status_code == 200, fault
        ids = [model["id"] for model in reply.json()["data"]]
        assert sorted(ids) == ["adapter", "m"], fault
    assert reply.json()["object"] == "list"


@pytest.mark.parametrize("body", [b"nonsense", b"null", b'{"data":[{"object":"model"}]}', b'{"data":7}'], ids=repr)
async def test_an_only_engine_that_lists_no_models_is_no_bug_of_the_proxy(make_rig, body):  # B37
    rig = await make_rig()
    rig.decodes[0].get_faults["/v1/models"] = Fault(body=body)
    reply = await rig.client.get("/v1/models")
    assert reply.status_code in (200, 502)
    assert reply.headers["content-type"] == "application/json"


async def test_an_engine_that_hangs_on_models_does_not_hold_readiness_or_requests_up(make_rig):  # B37
    rig = await make_rig()
    rig.decodes[0].get_faults["/v1/models"] = Fault(hold=asyncio.Event())
    call = asyncio.create_task(rig.client.get("/v1/models"))
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200
    assert (await rig.client.get("/ready")).status_code == 200
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_slow_engine_gets_no_more_while_a_quick_one_is_free(make_rig, role):  # B39
    rig = await make_rig(prefills=2, decodes=2) if role == "decode" else await make_rig(prefills=2, decodes=1)
    release = asyncio.Event()
    slow = rig.decodes[0] if role == "decode" else rig.prefills[0]
    slow.always = Fault(hold=release)
    calls = []
    for _ in range(20):
        calls.append(asyncio.create_task(rig.client.post(CHAT, json=BODY)))

        async def settled():
            return sum(call.done() for call in calls) + slow.now == len(calls)

        await rig.until(settled)
    assert slow.highest == 1
    assert len(slow.requests) == 1
    release.set()
    await asyncio.gather(*calls)


@pytest.mark.parametrize("load", [404, 200])
async def test_a_burst_is_spread_by_what_is_in_flight_whatever_load_answers(make_rig, load):  # B39
    rig = await make_rig(prefills=2, decodes=3)
    release = asyncio.Event()
    for engine in rig.decodes:
        engine.get_faults["/load"] = Fault(status=load, body=b'{"server_load":99}')
        engine.always = Fault(hold=release, pause_after=2)
    calls = [asyncio.create_task(rig.client.post(CHAT, json=STREAM)) for _ in range(48)]

    async def all_there():
        return sum(engine.now for engine in rig.decodes) == 48

    await rig.until(all_there)
    assert [engine.now for engine in rig.decodes] == [16, 16, 16]
    assert {await rig.metric("pdcluster_in_flight", endpoint=f"d{index}") for index in range(3)} == {16}
    release.set()
    await asyncio.gather(*calls)
    prefilled = [len(engine.requests) for engine in rig.prefills]
    assert sum(prefilled) == 48
    assert min(prefilled) >= 8


ENGINE_KEY, CLIENT_KEY = "Bearer engine-secret", "Bearer client-secret"


async def test_the_engines_key_is_on_every_call_and_the_clients_on_none(make_rig, caplog):  # B42
    caplog.set_level("DEBUG", "proxy")
    rig = await make_rig(engine_api_key="engine-secret")
    headers = {"authorization": CLIENT_KEY, "x-api-key": "client-secret", "api-key": "client-secret"}
    for stream in (False, True):
        for route in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/v1/embeddings"):
            assert (await rig.client.post(route, json={**BODY, "stream": stream}, headers=headers)).status_code == 200
    for path in ("/v1/models", "/version", "/metrics"):
        assert (await rig.client.get(path, headers=headers)).status_code == 200
    rig.decodes[0].faults = [Fault(status=500)] * 2
    await rig.client.post(CHAT, json=BODY, headers=headers)
    for engine in rig.prefills + rig.decodes:
        assert {seen.headers.get("authorization") for seen in engine.requests + engine.probes} == {ENGINE_KEY}
        assert not [seen for seen in engine.requests + engine.probes if "client-secret" in str(seen.headers)]
    assert {seen.path for seen in rig.decodes[0].probes} >= {"/health", "/v1/models", "/version", "/metrics"}
    logged = "".join(record.getMessage() for record in caplog.records if record.name.startswith("proxy"))
    assert "d0 answered 500" in logged
    shown = logged + (await rig.client.get("/metrics")).text + (await rig.client.get("/ready")).text
    assert "secret" not in shown


async def test_without_a_key_of_the_engines_the_clients_serves_its_own_calls_and_no_probe(make_rig):  # B42
    rig = await make_rig()
    await rig.client.post(CHAT, json=BODY, headers={"authorization": CLIENT_KEY})
    for engine in rig.prefills + rig.decodes:
        assert {seen.headers.get("authorization") for seen in engine.requests} == {CLIENT_KEY}
        assert {seen.headers.get("authorization") for seen in engine.probes} == {None}


async def test_an_engine_that_refuses_a_key_says_so_to_the_client(make_rig):  # B42
    rig = await make_rig()
    refusal = Fault(status=401, body=b'{"error":"Unauthorized"}', headers={"www-authenticate": "Bearer"})
    rig.prefills[0].always = refusal
    reply = await rig.client.post(CHAT, json=STREAM)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert await state_of(rig, "p0") == "ready"


async def test_metrics_name_each_engine_once_in_one_state_and_nobody_else(make_rig):  # B54
    rig = await make_rig(prefills=2, decodes=2)
    await rig.decodes[1].stop()
    await becomes(rig, "d1", "unhealthy")
    await rig.client.post(CHAT, json=STREAM)
    text = (await rig.client.get("/metrics")).text
    assert set(re.findall(r'endpoint="([^"]*)"', text)) == {"p0", "p1", "d0", "d1"}
    states = re.findall(r'^pdcluster_endpoint_state\{endpoint="(\w+)",.*\} 1\.0$', text, re.MULTILINE)
    assert sorted(states) == ["d0", "d1", "p0", "p1"]
    counters = re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE)
    assert all(name.endswith("_total") for name in counters)


async def test_metrics_count_a_request_once_whatever_it_took(make_rig):  # B54
    rig = await make_rig(decodes=2)
    rig.decodes[0].faults = [Fault(status=503)] * 3
    rig.prefills[0].faults = [Fault(), Fault(status=500)]
    for stream in (False, True) * 3:
        await rig.client.post(CHAT, json={**BODY, "stream": stream})
        await becomes(rig, "p0", "ready")
    assert await rig.metric("pdcluster_requests_total") == 6
    assert await rig.metric("pdcluster_request_seconds_count") == 6


@pytest.mark.parametrize(
    "text",
    [b"vllm:nixl_bytes_transferred_sum{} lots\n", b"\xff\x00\n", b"vllm:nixl_bytes_transferred_sum NaN\n", b"<html>", b'vllm:nixl_xfer_time_seconds_bucket{le="x"} 1\n', b"vllm:nixl_num_failed_transfers_total +Inf\n"],
    ids=repr,
)  # fmt: skip
async def test_metrics_of_an_engine_that_make_no_sense_do_not_take_the_proxys_away(make_rig, text):  # B54
    rig = await make_rig()
    rig.decodes[0].get_faults["/metrics"] = Fault(body=text)
    reply = await rig.client.get("/metrics")
    assert reply.status_code == 200
    assert "pdcluster_requests_total" in reply.text


async def test_an_engine_that_hangs_on_metrics_does_not_hold_the_proxys_up(make_rig):  # B54
    rig = await make_rig(timeouts=Timeouts(connect=1))
    rig.decodes[0].get_faults["/metrics"] = Fault(hold=asyncio.Event())
    began = asyncio.get_running_loop().time()
    assert (await rig.client.get("/metrics")).status_code == 200
    assert asyncio.get_running_loop().time() - began < 3


async def test_readiness_is_json_that_names_what_is_missing(make_rig):  # B37
    rig = await make_rig(health_interval=0.05)
    rig.prefills[0].health = 503
    await becomes(rig, "p0", "unhealthy")
    value = json.loads((await rig.client.get("/ready")).content)
    assert value["ready"] is False
    assert value["missing"] == ["p0 is unhealthy: /health answers 503"]
