"""What clients may send: values that engines read leniently, hostile fields, odd headers."""

import json

import httpx
import pytest

from tests.stand_in.engine import LIMIT_FIELDS, Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}


@pytest.mark.parametrize("route", [*LIMIT_FIELDS, "/tokenize"])
@pytest.mark.parametrize("value", ["", 0, [], "x", None, {}], ids=repr)
async def test_transfer_fields_among_vllm_xargs_are_refused_even_empty(rig, route, value):
    # In vLLM 0.32 an empty string there ends the engine: its connector takes it for parameters.
    for name in ("kv_transfer_params", "ec_transfer_params"):
        reply = await rig.client.post(route, json={**BODY, "n": 2, "vllm_xargs": {name: value}})
        assert reply.status_code == 400
        assert f"vllm_xargs.{name}" in reply.text
    assert rig.prefills[0].requests == rig.decodes[0].requests == []


async def test_other_vllm_xargs_reach_decode(rig):
    await rig.client.post(CHAT, json={**BODY, "vllm_xargs": {"a": 1}})
    assert rig.decodes[0].requests[0].json["vllm_xargs"] == {"a": 1}


@pytest.mark.parametrize("more", [{"n": "3"}, {"n": 2.0}, {"best_of": "2"}], ids=str)
async def test_several_choices_written_as_engines_accept_them_get_no_handoff(rig, more):
    reply = await rig.client.post("/v1/completions", json={**BODY, **more})
    assert reply.headers["x-pdcluster-path"].startswith("aggregated")
    assert "kv_transfer_params" not in rig.decodes[0].requests[0].json


@pytest.mark.parametrize("n", ["1", "many", None, True, [], {}], ids=repr)
async def test_a_strange_number_of_choices_is_left_to_the_engine(rig, n):
    assert (await rig.client.post(CHAT, json={**BODY, "n": n})).status_code == 200


@pytest.mark.parametrize("stream", [True, 1, "true", "True", "on", "yes"], ids=repr)
async def test_whatever_engines_take_for_a_stream_is_one(rig, stream):
    rig.decodes[0].faults = [Fault(end_after=3)]
    reply = await rig.client.post(CHAT, json={**BODY, "stream": stream})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "before it was complete" in reply.text


@pytest.mark.parametrize("stream", [False, 0, "false", None, "off"], ids=repr)
async def test_what_is_no_stream_to_engines_is_none(rig, stream):
    rig.decodes[0].faults = [Fault(body=b'{"id":"x"}')]
    reply = await rig.client.post(CHAT, json={**BODY, "stream": stream})
    assert reply.headers["content-type"] == "application/json"
    assert rig.prefills[0].requests[0].json["stream"] is False


def nested(depth):
    return b'{"messages":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(("depth", "status"), [(100, 200), (200, 400), (600, 400), (2000, 400)])
async def test_nesting_that_is_no_prompt_is_400_and_no_engine_is_called(rig, depth, status):
    reply = await rig.client.post(CHAT, content=nested(depth))
    assert reply.status_code == status
    assert len(rig.prefills[0].requests) == (status == 200)


async def test_many_shallow_objects_are_no_deep_nesting(rig):
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 500}
    assert (await rig.client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "latin-1"])
async def test_a_body_that_is_not_utf_8_is_400_and_no_engine_is_called(rig, encoding):
    reply = await rig.client.post(CHAT, content='{"messages": [], "x": "é"}'.encode(encoding))
    assert reply.status_code == 400
    assert rig.prefills[0].requests == rig.decodes[0].requests == []


@pytest.mark.parametrize("odd", [b'"\\ud83d"', b"123456789012345678901234567890"], ids=["surrogate", "integer"])
@pytest.mark.parametrize("more", [b"", b',"n":2'], ids=["split", "alone"])
async def test_values_that_few_parsers_take_survive_a_body_that_must_be_written_anew(rig, odd, more):
    raw = b'{"messages":[],"kv_transfer_params":null,"x":' + odd + more + b"}"
    assert (await rig.client.post(CHAT, content=raw)).status_code == 200
    assert rig.decodes[0].requests[0].json["x"] == json.loads(odd)


async def test_headers_beyond_ascii_are_passed_on_or_dropped_never_a_bug(rig):
    headers = [(b"accept", "é".encode("latin-1")), (b"authorization", "Bearer é".encode())]
    request = httpx.Request("POST", rig.client.base_url.join(CHAT), json=BODY, headers=headers)
    assert (await rig.client.send(request)).status_code == 200
    assert rig.decodes[0].requests[0].headers["accept"] == "é"


async def test_an_empty_transfer_field_reaches_no_engine_on_a_plain_route(rig):
    await rig.client.post("/tokenize", json={"prompt": "x", "kv_transfer_params": {}})
    assert rig.decodes[0].requests[0].json == {"prompt": "x"}


async def test_a_prefill_is_not_asked_for_log_probabilities_of_tokens(rig):
    sent = {**BODY, "logprobs": True, "top_logprobs": 2, "logprob_token_ids": [1, 2]}
    assert (await rig.client.post(CHAT, json=sent)).status_code == 200
    assert not {"logprobs", "top_logprobs", "logprob_token_ids"} & rig.prefills[0].requests[0].json.keys()
    assert rig.decodes[0].requests[0].json["logprob_token_ids"] == [1, 2]


@pytest.mark.parametrize("path", ["/v1/models/", "/docs", "/v1/completions/", "/load", "/reset_prefix_cache"])
async def test_paths_that_are_not_listed_are_404_and_counted_without_their_name(rig, path):
    reply = await rig.client.get(path)
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert await rig.metric("pdcluster_requests_total", route="other", outcome="client_error") == 1


async def test_plain_calls_are_counted_by_route(rig):
    await rig.client.post("/tokenize", json={})
    await rig.client.post("/tokenize", content=b"{bad")
    rig.decodes[0].faults = [Fault(close_before_headers=True)] * 2  # a reused connection is given a second chance
    assert (await rig.client.post("/tokenize", json={})).status_code == 502
    for outcome in ("ok", "client_error", "engine_error"):
        assert await rig.metric("pdcluster_requests_total", route="/tokenize", outcome=outcome) == 1, outcome
