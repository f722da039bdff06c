"""The edge of the proxy: what clients may send, what they see, readiness, models, metrics."""

import asyncio
import json

import pytest

from proxy.config import ClientLimits
from tests.stand_in.engine import Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize(
    "route", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/embeddings"]
)
async def test_a_client_that_sets_transfer_fields_is_refused_and_no_engine_is_called(rig, field, route):
    reply = await rig.client.post(route, json={**BODY, field: {"do_remote_prefill": True, "remote_host": "10.0.0.9"}})
    assert reply.status_code == 400
    assert field in reply.text
    assert rig.prefills[0].requests == rig.decodes[0].requests == []


@pytest.mark.parametrize("value", [None, {}])
async def test_an_empty_transfer_field_is_tolerated_and_dropped(rig, value):
    reply = await rig.client.post(CHAT, json={**BODY, "kv_transfer_params": value, "n": 1})
    assert reply.status_code == 200
    assert rig.decodes[0].requests[0].json["kv_transfer_params"]["remote_engine_id"]
    reply = await rig.client.post(CHAT, json={**BODY, "kv_transfer_params": value, "n": 2})
    assert "kv_transfer_params" not in rig.decodes[0].requests[1].json


async def test_a_transfer_field_hidden_behind_a_duplicate_key_does_not_reach_an_engine(rig):
    raw = b'{"messages":[],"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"},"kv_transfer_params":null}'
    reply = await rig.client.post(CHAT, content=raw)
    assert reply.status_code == 200
    for engine in rig.prefills + rig.decodes:
        assert b"evil" not in engine.requests[0].raw


async def test_a_transfer_field_written_with_escapes_is_refused(rig):
    reply = await rig.client.post(
        CHAT, content=b'{"messages":[],"\\u006bv_transfer_params":{"do_remote_prefill":true}}'
    )
    assert reply.status_code == 400


async def test_internal_headers_of_a_client_reach_no_engine(rig):
    headers = {
        "x-data-parallel-rank": "1",
        "x-vllm-priority": "9",
        "x-session-id": "s",
        "x-prefiller-host-port": "evil:1",
    }
    headers |= {"x-request-id": "mine-1", "traceparent": "00-1-2-03", "cookie": "c=1", "authorization": "Bearer client"}
    reply = await rig.client.post(CHAT, json=BODY, headers=headers)
    for engine in rig.prefills + rig.decodes:
        got = engine.requests[0].headers
        assert (
            not {"x-data-parallel-rank", "x-vllm-priority", "x-session-id", "x-prefiller-host-port", "cookie"}
            & got.keys()
        )
        assert got["traceparent"] == "00-1-2-03"
        assert got["x-request-id"] != "mine-1"
    assert reply.headers["x-request-id"] == "mine-1"
    assert "server" not in reply.headers


async def test_a_harmful_request_id_is_replaced(rig):
    reply = await rig.client.post(CHAT, json=BODY, headers={"x-request-id": "a b<script>"})
    assert reply.headers["x-request-id"].startswith("pdc-")


async def test_the_engines_key_replaces_the_clients(make_rig):
    rig = await make_rig(engine_api_key="engine-secret")
    await rig.client.post(CHAT, json=BODY, headers={"authorization": "Bearer client-secret"})
    for engine in rig.prefills + rig.decodes:
        assert engine.requests[0].headers["authorization"] == "Bearer engine-secret"


async def test_a_handoff_in_decodes_reply_does_not_reach_the_client(rig):
    secret = {
        "choices": [],
        "kv_transfer_params": {"remote_host": "10.0.0.1"},
        "prompt_token_ids": [1, 2],
        "metrics": {"a": 1},
    }
    rig.decodes[0].faults = [Fault(body=json.dumps(secret).encode())]
    assert (await rig.client.post(CHAT, json=BODY)).json() == {"choices": []}


async def test_token_ids_that_were_asked_for_are_kept(rig):
    body = b'{"choices":[],"prompt_token_ids":[1,2],"kv_transfer_params":null}'
    rig.decodes[0].faults = [Fault(body=body)]
    reply = await rig.client.post(CHAT, json={**BODY, "return_token_ids": True})
    assert reply.content == b'{"choices":[],"prompt_token_ids":[1,2]}'


async def test_an_answer_keeps_its_bytes(rig):
    body = b'{ "choices":[{"x":1e-7,"y":"\\"kv_transfer_params\\":null","z":NaN}], "kv_transfer_params": null}'
    rig.decodes[0].faults = [Fault(body=body)]
    reply = await rig.client.post(CHAT, json=BODY)
    assert reply.content == b'{ "choices":[{"x":1e-7,"y":"\\"kv_transfer_params\\":null","z":NaN}]}'


@pytest.mark.parametrize(
    "raw",
    [b"", b"  ", b"{bad", b"[]", b"null", b"123", b'"text"', b"\xff\xfe", b'{"a":' * 3000, b'{"a":' + b"[" * 100_000],
    ids=["empty", "blank", "broken", "list", "null", "number", "string", "not utf-8", "unclosed", "deep"],
)
@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/tokenize"])
async def test_a_body_that_is_no_json_object_is_400_and_no_engine_is_called(rig, route, raw):
    reply = await rig.client.post(route, content=raw)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert reply.json().get("type") == ("error" if route == "/v1/messages" else None)
    assert rig.prefills[0].requests == rig.decodes[0].requests == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(make_rig, chunked):
    rig = await make_rig(limits=ClientLimits(body_bytes=1 << 20))

    async def parts():
        for _ in range(20):
            yield b" " * (1 << 16)
        yield b"x" * (1 << 16)

    content = parts() if chunked else b"x" * (1 << 21)
    reply = await rig.client.post(CHAT, content=content)
    assert reply.status_code == 413
    assert "--max-body-mb" in reply.json()["error"]["message"]
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200


async def test_a_prompt_of_a_million_tokens_fits(rig):
    body = {"model": "m", "messages": [{"role": "user", "content": "word " * 1_000_000}]}
    assert (await rig.client.post(CHAT, json=body)).status_code == 200
    assert len(rig.decodes[0].requests[0].raw) > 5_000_000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("HEAD", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/audio/transcriptions", 501),
        ("GET", "/v1/responses/resp_1", 501),
        ("POST", "/inference/v1/generate", 501),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/abort_requests", 404),
        ("GET", "/docs", 404),
    ],
)
async def test_routes_that_are_not_served_say_so_in_openais_shape(rig, method, path, status):
    reply = await rig.client.request(method, path)
    assert reply.status_code == status
    if method != "HEAD":
        assert reply.json()["error"]["message"]
    assert rig.decodes[0].requests == []


async def test_plain_calls_go_to_one_decode_engine(rig):
    reply = await rig.client.post("/tokenize", json={"model": "m", "prompt": "x"})
    assert reply.json() == {"echo": "/tokenize"}
    assert (await rig.client.get("/version")).json() == {"version": "0.32.0"}
    assert rig.prefills[0].requests == []


async def test_models_are_the_union_of_the_ready_engines(make_rig):
    rig = await make_rig(decodes=3)
    await rig.decodes[0].stop()
    reply = await rig.client.get("/v1/models")
    assert [model["id"] for model in reply.json()["data"]] == ["m"]


async def test_health_is_the_proxys_own_and_readiness_needs_a_pair(make_rig):
    rig = await make_rig()
    rig.prefills[0].health = 503
    await rig.until(lambda: not_ready(rig))
    reply = await rig.client.get("/ready")
    assert "p0 is unhealthy: /health answers 503" in reply.json()["missing"]
    assert (await rig.client.get("/health")).json() == {"status": "ok"}
    served = await rig.client.post(CHAT, json=BODY)
    assert served.headers["x-pdcluster-path"] == "aggregated; reason=no_prefill"
    rig.prefills[0].health = 200
    await rig.ready()
    assert (await rig.client.post(CHAT, json=BODY)).headers["x-pdcluster-path"] == "disaggregated"


async def not_ready(rig):
    return (await rig.client.get("/ready")).status_code == 503


async def test_without_decode_every_request_is_503_with_retry_after(make_rig):
    rig = await make_rig()
    rig.decodes[0].health = 500
    await rig.until(lambda: not_ready(rig))
    for reply in (
        await rig.client.post(CHAT, json=BODY),
        await rig.client.get("/v1/models"),
        await rig.client.post("/tokenize", json={}),
    ):
        assert reply.status_code == 503
        assert reply.headers["retry-after"]


async def test_an_excluded_pair_never_serves_together(make_rig):
    rig = await make_rig(prefills=2, decodes=2, excluded_pairs=frozenset({("p0", "d0"), ("p1", "d0")}))
    replies = await asyncio.gather(*(rig.client.post(CHAT, json=BODY) for _ in range(20)))
    assert {reply.headers["x-pdcluster-path"] for reply in replies} == {"disaggregated"}
    assert rig.decodes[0].requests == []
    assert "p0 and d0 are excluded from serving together" in (await rig.client.get("/ready")).json()["missing"]


async def test_a_burst_is_spread_over_the_endpoints(make_rig):
    rig = await make_rig(prefills=2, decodes=4)
    release = asyncio.Event()
    for engine in rig.decodes:
        engine.faults = [Fault(hold=release) for _ in range(10)]
    calls = [asyncio.create_task(rig.client.post(CHAT, json=BODY)) for _ in range(16)]

    async def all_held():
        return sum(len(engine.requests) for engine in rig.decodes) == 16

    await rig.until(all_held)
    assert [len(engine.requests) for engine in rig.decodes] == [4, 4, 4, 4]
    release.set()
    await asyncio.gather(*calls)


KV = """\
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.01",model_name="m"} %(n)d.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} %(n)d.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.5
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} %(n)d.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} %(n)d.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} %(n)d000.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} %(n)d.0
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 2.0
"""


async def test_kv_transfer_figures_come_from_decode_and_grow_over_its_restarts(rig):
    rig.decodes[0].metrics = KV % {"n": 5}

    async def bytes_are(expected):
        return await rig.metric("pdcluster_kv_transfer_bytes_sum", decode="d0") == expected

    await rig.until(lambda: bytes_are(5000))
    assert await rig.metric("pdcluster_kv_transfer_seconds_count") == 5
    assert await rig.metric("pdcluster_kv_transfer_seconds_sum") == 0.5
    assert await rig.metric("pdcluster_kv_transfer_failures_total") == 2
    rig.decodes[0].metrics = KV % {"n": 1}
    await rig.until(lambda: bytes_are(6000))


async def test_hostile_values_make_no_labels(rig):
    await rig.client.post(CHAT, json={"model": "evil-model", "messages": []}, headers={"x-request-id": "evil-id"})
    await rig.client.get("/evil-path")
    assert "evil" not in (await rig.client.get("/metrics")).text


async def test_nothing_a_client_sent_is_logged(make_rig, caplog):
    rig = await make_rig()
    rig.decodes[0].faults = [Fault(status=500)]
    await rig.client.post(CHAT, json={"messages": "secret-prompt"}, headers={"authorization": "Bearer secret-key"})
    assert "d0 answered 500" in caplog.text
    rig.decodes[0].faults = [Fault(events=[b'data: {"error": {"message": "secret-prompt is odd"}}\n\n'])] * 2
    reply = await rig.client.post(CHAT, json={"messages": "secret-prompt", "stream": True})
    assert "secret-prompt is odd" in reply.text
    assert "the engine reported an error in its stream (d0)" in caplog.text
    assert "secret" not in caplog.text + (await rig.client.get("/ready")).text
