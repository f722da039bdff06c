"""Reported failures of the kind: a body or header changed, lost, or let through on its way to an engine or a client.

Which test holds which case of the collection of public reports (B numbers); files are of this directory, and
`cases_x` stands for `test_cases_x.py`. Cases that need real engines or a launch plan are held elsewhere.

| case | held by |
|---|---|
| B01 single use | cases_handoffs: all of "once"; test_handoff: a_decode_that_fails_before_the_first_byte...; each rig's violations |
| B02 prompt lists | test_handoff: what_cannot_be_split..., one_prompt_in_whatever_form...; here: prompts_that_are_lists... |
| B03 n > 1 | test_handoff: what_cannot_be_split...; test_inputs: several_choices...; here: several_choices_are_streamed... |
| B04 hostile fields | test_routes: a_client_that_sets..., hidden_behind..., written_with_escapes, internal_headers; test_inputs; here: hostile |
| B05 lease | test_limits: a_handoff_nearly_as_old_as_its_lease... |
| B09 status before 200 | test_handoff: a_decode_4xx..., an_error_at_the_beginning...; cases_errors: each_status_of_decode... |
| B10 prefill 4xx | test_handoff: a_prefill_4xx...; cases_errors: each_4xx_of_prefill... |
| B11 broken streams | test_handoff: a_stream_that_breaks..., ..._cut_twice_is_502; test_streams; cases_errors: breaks |
| B13 silent loss of KV | test_handoff: a_reply_without_a_usable_handoff..., where_every_prefill_fails...; cases_handoffs: unusable |
| B16 bytes kept | test_handoff: the_clients_bytes...; test_bodies; here: the_prefill_leg_keeps..., odd_numbers... |
| B17 min_tokens | test_handoff: prefill_makes_one_token...; here: no_field_that_prefill_would_refuse... |
| B18 usage | here: usage... |
| B19 token limits | test_handoff: prefill_makes_one_token...; here: every_limit_of_every_api... |
| B22 logprobs, echo | test_handoff: what_cannot_be_split...; here: logprobs... |
| B24, B25 disconnects | test_handoff: leaves...; cases_disconnects |
| B26 stranded KV | test_release |
| B27 timeouts | test_handoff, test_limits; cases_timeouts |
| B30, B31 leaks | test_handoff: many_mixed...; test_limits: ...no_connection_behind; cases_disconnects: flat |
| B34 4xx and health | test_handoff: client_errors_never...; cases_health: statuses_that_say_nothing... |
| B35 ejection | test_limits: an_engine_that_answers_500..., ..._whose_health_lies...; cases_health |
| B37 readiness | test_routes: health_is_the_proxys_own...; cases_health |
| B39 spread | test_routes: a_burst_is_spread...; cases_health: a_slow_engine... |
| B40 ranks | test_routes: internal_headers...; here: rank |
| B42 keys | test_routes: the_engines_key...; cases_health: key |
| B43 Retry-After | test_handoff, test_limits: a_full_engine...; cases_errors: retry_after |
| B44 endpoints | test_routes: routes_that_are_not_served...; test_inputs: paths...; cases_limits: routes |
| B48 large bodies | test_routes: ..._million_tokens, ..._413; cases_limits |
| B49 malformed | test_routes: ...no_json_object...; test_inputs; here: content types; test_fuzz |
| B50 buffering | test_handoff: each_event_arrives...; cases_framing: gated |
| B54 metrics | test_routes: kv_transfer_figures..., hostile_values...; cases_health: metrics |
| B67 drain | test_cli: sigterm...; cases_limits: drain |
"""

import json

import pytest

from tests.stand_in.engine import LIMIT_FIELDS, Fault
from tests.stand_in.fault import NAN_REPLY, token

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
EVIL = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1, "remote_block_ids": [[1]]}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def legs(rig):
    """Return what both legs of the only request got."""
    (prefill,), (decode,) = rig.prefills[0].requests, rig.decodes[0].requests
    return prefill.json, decode.json


@STREAMS
@pytest.mark.parametrize(
    "prompt",
    [["a", "b", "c"], [[1, 2], [3, 4]], [[1], "a"], ["a", [1]], [["a"], ["b"]], ["a"] * 200, [[], []], [None, 1]],
    ids=lambda prompt: repr(prompt)[:20],
)
async def test_prompts_that_are_lists_of_several_get_no_handoff_and_stay_as_they_are(shared, prompt, stream):  # B02
    body = {"model": "m", "prompt": prompt, "stream": stream}
    reply = await shared.client.post(COMPLETIONS, json=body)
    assert reply.headers["x-pdcluster-path"] == "aggregated; reason=prompt_list"
    assert shared.prefills[0].requests == []
    assert shared.decodes[0].requests[0].json == body


@pytest.mark.parametrize("prompt", ["", [], [1], [[1]], [[]], [""], None, 5, {"a": 1}, [True]], ids=repr)
async def test_a_prompt_that_is_not_several_never_gets_a_handoff_without_its_own_prefill(shared, prompt):  # B02
    assert (await shared.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt})).status_code == 200
    got = shared.decodes[0].requests[0].json
    assert ("kv_transfer_params" in got) == (len(shared.prefills[0].requests) == 1)


async def test_several_choices_are_streamed_from_decode_with_their_indices(shared):  # B03
    events = [b'data: {"choices":[{"index":%d,"delta":{"content":"t"}}]}\n\n' % index for index in (0, 2, 1)]
    shared.decodes[0].faults = [Fault(events=[*events, b"data: [DONE]\n\n"])]
    reply = await shared.client.post(CHAT, json={**BODY, "n": 3, "stream": True, "temperature": 1})
    assert reply.content == b"".join([*events, b"data: [DONE]\n\n"])
    assert shared.decodes[0].requests[0].json["n"] == 3
    assert shared.prefills[0].requests == []


@pytest.mark.parametrize("route", LIMIT_FIELDS)
@pytest.mark.parametrize("n", [1, 1.0, "1", None], ids=repr)
async def test_prefill_makes_one_choice_and_decode_gets_the_clients_number(shared, route, n):  # B03
    await shared.client.post(route, json={**BODY, "prompt": "x", "n": n})
    prefill, decode = legs(shared)
    assert (prefill["n"], decode["n"]) == (1, n)


@STREAMS
@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[],"kv_transfer_params":null,"kv_transfer_params":{"do_remote_prefill":true}}',
        b'{"messages":[],"kv_transfer_params":[1]}',
        b'{"messages":[],"kv_transfer_params":"x"}',
        b'{"messages":[],"kv_transfer_params":1}',
        b'{"messages":[],"ec_transfer_params":true}',
        b'{"messages":[],"kv_transfer_\\u0070arams":{"do_remote_decode":true}}',
        b'{"messages":[],"vllm_xargs":{"kv_transfer_params":{"do_remote_prefill":true}}}',
    ],
    ids=lambda raw: raw[14:50],
)
async def test_a_hostile_transfer_field_in_any_form_reaches_no_engine(shared, raw, stream):  # B04
    reply = await shared.client.post(CHAT, content=raw[:-1] + b',"stream":' + (b"true}" if stream else b"false}"))
    assert reply.status_code == 400
    assert shared.prefills[0].requests == shared.decodes[0].requests == []


@pytest.mark.parametrize("route", LIMIT_FIELDS)
async def test_a_hostile_transfer_field_is_refused_also_where_decode_would_serve_alone(shared, route):  # B04
    for more in ({"n": 2}, {"prompt": ["a", "b"]}, {"prompt_logprobs": 1}, {"use_beam_search": True}):
        reply = await shared.client.post(route, json={**BODY, **more, "kv_transfer_params": EVIL})
        assert reply.status_code == 400
    assert shared.decodes[0].requests == []


async def test_a_query_string_reaches_no_engine(shared):  # B04
    reply = await shared.client.post(CHAT, json=BODY, params={"kv_transfer_params": "x", "remote_host": "10.0.0.9"})
    assert reply.status_code == 200
    assert {seen.path for engine in (shared.prefills[0], shared.decodes[0]) for seen in engine.requests} == {CHAT}


async def test_a_transfer_field_deeper_in_a_body_is_content_and_is_kept(shared):  # B04
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"kv_transfer_params": {"type": "string"}}}}]
    assert (await shared.client.post(CHAT, json={**BODY, "tools": tools})).status_code == 200
    prefill, decode = legs(shared)
    assert prefill["tools"] == decode["tools"] == tools


@pytest.mark.parametrize("nested", [False, True], ids=["top", "response"])
async def test_a_handoff_in_a_streams_last_event_does_not_reach_the_client(shared, nested):  # B04
    inner = {"id": "r", "kv_transfer_params": EVIL}
    value = {"response": inner, "type": "response.completed"} if nested else {**inner, "type": "response.completed"}
    last = b"event: response.completed\ndata: " + json.dumps(value).encode() + b"\n\n"
    first = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'
    shared.decodes[0].faults = [Fault(events=[first, last], byte_by_byte=True)]
    reply = await shared.client.post("/v1/responses", json={**BODY, "stream": True})
    assert "10.0.0.9" not in reply.text
    assert "transfer_params" not in reply.text
    assert '"id":"r"' in reply.text.replace(" ", "")


AGENT = {
    "model": "m",
    "messages": [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"arguments": '{"a":null}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
        {"role": "user", "content": "", "name": None},
    ],
    "chat_template_kwargs": {"enable_thinking": False, "deep": [None, {"a": []}]},
    "cache_salt": "s",
    "priority": -3,
    "return_token_ids": True,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [None, 1, 1.5]}}},
    "unknown_of_tomorrow": {"": None},
    "temperature": 1.0,
    "seed": 9007199254740993,
}


async def test_the_prefill_leg_keeps_everything_that_is_not_its_own_business(shared):  # B16
    await shared.client.post(CHAT, json=AGENT)
    prefill, decode = legs(shared)
    for name, value in AGENT.items():
        assert prefill[name] == decode[name] == value, name
        assert type(prefill[name]) is type(value), name


@pytest.mark.parametrize(
    "number",
    [b"NaN", b"-Infinity", b"1e400", b"-0.0", b"1e-7", b"0.1", b"9007199254740993", b"18446744073709551616", b"1E5"],
    ids=bytes.decode,
)
async def test_odd_numbers_mean_the_same_to_both_legs(shared, number):  # B16
    reply = await shared.client.post(CHAT, content=b'{"messages":[],"seed":1,"x":[' + number + b"]}")
    assert reply.status_code == 200
    prefill, decode = legs(shared)
    assert repr(prefill["x"]) == repr(decode["x"]) == repr(json.loads(b"[" + number + b"]"))


@pytest.mark.parametrize("text", ["\ud83d", "\x00", "\u2028", "é", "😀", "\\ud83d", "</script>", "\x7f"], ids=ascii)
async def test_odd_characters_mean_the_same_to_both_legs(shared, text):  # B16
    reply = await shared.client.post(CHAT, content=json.dumps({"messages": [{"content": text}], text: text}))
    assert reply.status_code == 200
    prefill, decode = legs(shared)
    assert prefill["messages"] == decode["messages"] == [{"content": text}]
    assert prefill[text] == decode[text] == text


async def test_of_a_key_that_comes_twice_both_legs_take_the_same_one(shared):  # B16
    await shared.client.post(
        CHAT, content=b'{"model":"a","messages":[],"x":1,"model":"b","x":2,"max_tokens":5,"max_tokens":7}'
    )
    prefill, decode = legs(shared)
    assert [prefill[name] for name in ("model", "x")] == [decode[name] for name in ("model", "x")] == ["b", 2]
    assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 7)


HARD_FOR_PREFILL = {
    "min_tokens": 100,
    "stop": ["x", "y"],
    "stop_token_ids": [1, 2],
    "stop_sequences": ["z"],
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "logprobs": True,
    "top_logprobs": 5,
    "logprob_token_ids": [7],
    "background": False,
}


@STREAMS
@pytest.mark.parametrize("route", LIMIT_FIELDS)
async def test_no_field_that_prefill_would_refuse_is_sent_there_and_decode_gets_them_all(shared, route, stream):
    # B15, B17, B18: the stand-in's own checks name the fields
    sent = {**BODY, "prompt": "x", **HARD_FOR_PREFILL, "max_tokens": 500, "stream": stream}
    assert (await shared.client.post(route, json=sent)).status_code == 200
    prefill, decode = legs(shared)
    assert not HARD_FOR_PREFILL.keys() & prefill.keys()
    assert decode.pop("kv_transfer_params")
    assert decode == sent


@pytest.mark.parametrize("route", LIMIT_FIELDS)
@pytest.mark.parametrize("value", [64, None, 0, -1, 2**30, "64", 1.5], ids=repr)
async def test_every_limit_of_every_api_is_one_on_prefill_and_the_clients_on_decode(shared, route, value):  # B19
    names = {name for limits in LIMIT_FIELDS.values() for name in limits}
    sent = {**BODY, "prompt": "x", **dict.fromkeys(names, value)}
    await shared.client.post(route, json=sent)
    prefill, decode = legs(shared)
    assert all(prefill[name] == 1 for name in LIMIT_FIELDS[route])
    assert {name: decode[name] for name in names} == dict.fromkeys(names, value)


@pytest.mark.parametrize("often", [False, True], ids=["once", "each"])
async def test_usage_comes_from_decode_as_often_as_decode_tells_it(shared, often):  # B18
    usage = b'"usage":{"prompt_tokens":3,"completion_tokens":%d}'
    events = [b'data: {"choices":[{"delta":{"content":"t"}}],' + usage % i + b"}\n\n" for i in range(3)]
    events = events if often else [token("t")] * 3
    events += [b'data: {"choices":[],' + usage % 3 + b"}\n\n", b"data: [DONE]\n\n"]
    shared.decodes[0].faults = [Fault(events=events)]
    options = {"include_usage": True, "continuous_usage_stats": often}
    reply = await shared.client.post(CHAT, json={**BODY, "stream": True, "stream_options": options})
    assert reply.content == b"".join(events)
    assert reply.content.count(b'"choices":[],') == 1


@pytest.mark.parametrize(
    ("route", "more", "split"),
    [
        (CHAT, {"prompt_logprobs": 1}, False),
        (CHAT, {"prompt_logprobs": 0}, False),
        (CHAT, {"prompt_logprobs": None}, True),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, False),
        (COMPLETIONS, {"echo": True}, False),
        (COMPLETIONS, {"echo": False, "logprobs": 1}, True),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, True),
        (CHAT, {"logprobs": True, "top_logprobs": 2, "stream": True}, True),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, False),
    ],
    ids=str,
)
async def test_logprobs_of_a_prompt_are_decodes_alone_and_those_of_tokens_stay(shared, route, more, split):  # B22
    sent = {**BODY, "prompt": "a b c", **more}
    assert (await shared.client.post(route, json=sent)).status_code == 200
    got = shared.decodes[0].requests[0].json
    assert (got.pop("kv_transfer_params", None) is not None) == split
    assert got == sent
    assert len(shared.prefills[0].requests) == split


async def test_nan_among_logprobs_reaches_the_client_as_it_is(shared):  # B22
    shared.decodes[0].faults = [Fault(body=NAN_REPLY)]
    reply = await shared.client.post(CHAT, json={**BODY, "logprobs": True})
    assert b'"token_logprobs":[NaN,-Infinity]' in reply.content
    assert b"kv_transfer_params" not in reply.content


@pytest.mark.parametrize("rank", ["x", "-1", "99", "0", ""])
@pytest.mark.parametrize("route", [CHAT, "/tokenize"])
async def test_a_clients_rank_reaches_no_engine_and_no_engines_rank_the_client(shared, route, rank):  # B40
    reply = await shared.client.post(route, json=BODY, headers={"X-DATA-parallel-Rank": rank, "x-request-id": "mine"})
    assert reply.status_code == 200
    for engine in (shared.prefills[0], shared.decodes[0]):
        assert not [seen for seen in engine.requests if "x-data-parallel-rank" in seen.headers]
    assert reply.headers.get_list("x-request-id") == ["mine"]


async def test_both_legs_of_an_attempt_share_an_id_that_is_the_proxys(shared):  # B40
    for _ in range(3):
        await shared.client.post(CHAT, json=BODY, headers={"x-request-id": "the-same"})
    ids = [
        [seen.headers["x-request-id"] for seen in engine.requests] for engine in (shared.prefills[0], shared.decodes[0])
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 3


HOP_BY_HOP = {
    "connection": "keep-alive, x-mine",
    "x-mine": "1",
    "te": "trailers",
    "upgrade": "websocket",
    "forwarded": "for=1.2.3.4",
    "x-forwarded-for": "1.2.3.4",
    "host": "evil.example",
    "cookie": "secret",
    "x-vllm-priority": "1",
    "endpoint-load-metrics-format": "JSON",
    "x-kv-transfer-params": "{}",
}


async def test_headers_that_concern_one_hop_or_steer_engines_are_not_passed_on(shared):  # B04, B40
    lines = "".join(f"{name}: {value}\r\n" for name, value in HOP_BY_HOP.items()).encode()
    raw = json.dumps(BODY).encode()
    sent = b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (CHAT.encode(), lines, len(raw), raw)
    assert (await shared.raw(sent, until=b"\r\n")).startswith(b"HTTP/1.1 200")
    for engine in (shared.prefills[0], shared.decodes[0]):
        got = engine.requests[0].headers
        assert not (HOP_BY_HOP.keys() - {"connection", "host"}) & got.keys()
        assert got["host"] == engine.url.removeprefix("http://")
        assert "x-mine" not in got.get("connection", "")


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        ";;",
        "application/json; charset=utf-16",
    ],
)
@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/tokenize"])
async def test_a_wrong_content_type_is_a_clients_error_or_the_engines_to_judge(shared, route, kind):  # B49
    raw = json.dumps(BODY).encode()
    reply = await shared.client.post(route, content=raw, headers={} if kind is None else {"content-type": kind})
    assert reply.status_code in (200, 400, 415)
    assert len(shared.decodes[0].requests) == (reply.status_code == 200)


@pytest.mark.parametrize("body", [{}, {"model": 123}, {"messages": "x"}, {"messages": None, "stream": True}], ids=str)
@pytest.mark.parametrize("route", LIMIT_FIELDS)
async def test_what_only_an_engine_can_judge_is_refused_by_one_engine_once(shared, route, body):  # B49
    refusal = b'{"error":{"message":"messages: field required","type":"BadRequestError","code":400}}'
    shared.prefills[0].always = Fault(status=400, body=refusal)
    reply = await shared.client.post(route, json=body)
    assert (reply.status_code, reply.content) == (400, refusal)
    assert (len(shared.prefills[0].requests), len(shared.decodes[0].requests)) == (1, 0)
