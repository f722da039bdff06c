"""Every path of a request through prefill and decode, right and wrong, against stand-in engines."""

import asyncio
import json

import httpx
import pytest

from tests.stand_in.engine import LIMIT_FIELDS, Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
STREAM = {**BODY, "stream": True}
ROUTES = tuple(LIMIT_FIELDS)
ERROR = json.dumps({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}).encode()


async def lines_of(client, body, route=CHAT):
    async with client.stream("POST", route, json=body) as reply:
        return reply, [line async for line in reply.aiter_lines() if line]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_each_api_runs_on_both_legs_with_one_handoff(rig, route, stream):
    reply = await rig.client.post(route, json={**BODY, "stream": stream})
    assert reply.status_code == 200
    assert reply.headers["x-pdcluster-path"] == "disaggregated"
    assert (len(rig.prefills[0].requests), len(rig.decodes[0].requests)) == (1, 1)
    assert len(rig.wire.used) == 1
    assert "transfer_params" not in reply.text


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_tokens": 64}, {"max_completion_tokens": 64}, {"max_tokens": 64, "max_completion_tokens": 32}],
    ids=["none", "old", "new", "both"],
)
async def test_prefill_makes_one_token_and_decode_gets_the_clients_limits(rig, limits):
    messages = {"messages": BODY["messages"], "min_tokens": 5, "stop": ["x"], "stop_token_ids": [3], "n": 1}
    sent = {**messages, **limits, "stream": True, "stream_options": {"include_usage": True}}
    await rig.client.post(CHAT, json=sent)
    got = rig.decodes[0].requests[0].json
    got.pop("kv_transfer_params")
    assert got == sent
    assert rig.prefills[0].requests[0].json["ignore_eos"] is True


async def test_the_clients_bytes_reach_decode_unchanged_apart_from_the_handoff(rig):
    raw = (
        b'{ "messages" : [{"role":"tool","content":null,"x":[1e-7, 9007199254740993, 123456789012345678901234567890]}],\n'
        b'  "chat_template_kwargs": {"a": "\\ud83d lone"}, "cache_salt":"\xc3\xa9", "max_tokens":1.0e1 }\n'
    )
    reply = await rig.client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 200
    got = rig.decodes[0].requests[0].raw
    assert got.startswith(raw.rstrip()[:-1].rstrip())
    assert json.loads(got)["kv_transfer_params"]["do_remote_prefill"] is True


async def test_a_prefill_4xx_goes_to_the_client_as_it_is_without_retry_or_decode(rig):
    rig.prefills[0].faults = [Fault(status=400, body=ERROR)]
    reply = await rig.client.post(CHAT, json=BODY)
    assert (reply.status_code, reply.content) == (400, ERROR)
    assert (len(rig.prefills[0].requests), len(rig.decodes[0].requests)) == (1, 0)


async def test_an_overloaded_prefills_retry_after_reaches_the_client(rig):
    rig.prefills[0].faults = [Fault(status=429, body=ERROR, headers={"retry-after": "7"})]
    reply = await rig.client.post(CHAT, json=BODY)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")


async def test_client_errors_never_take_an_endpoint_out(rig):
    rig.prefills[0].faults = [Fault(status=400, body=ERROR)] * 20
    for _ in range(20):
        assert (await rig.client.post(CHAT, json=BODY)).status_code == 400
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200
    assert await rig.metric("pdcluster_endpoint_state", endpoint="p0", state="ready") == 1


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(close_before_headers=True), Fault(status=503)])
async def test_a_failing_prefill_is_replaced_by_another_one_with_a_new_request_id(make_rig, fault):
    rig = await make_rig(prefills=2)
    for engine in rig.prefills:
        engine.faults = []
    first = rig.prefills[0]
    first.faults = [fault] * 9
    for _ in range(6):
        reply = await rig.client.post(CHAT, json=BODY)
        assert reply.headers["x-pdcluster-path"] == "disaggregated"
        await rig.until(lambda: ready(rig, "p0"))
    ids = [{seen.headers["x-request-id"] for seen in engine.requests} for engine in rig.prefills]
    assert len(first.requests) >= 1
    assert not ids[0] & ids[1]
    assert await rig.metric("pdcluster_retries_total", leg="prefill") == len(ids[0])


async def ready(rig, name):
    return await rig.metric("pdcluster_endpoint_state", endpoint=name, state="ready") == 1


async def test_where_every_prefill_fails_decode_serves_alone_and_it_is_counted(rig):
    rig.prefills[0].faults = [Fault(status=500)] * 2
    reply = await rig.client.post(CHAT, json=BODY)
    assert reply.status_code == 200
    assert reply.headers["x-pdcluster-path"] == "aggregated; reason=prefill_failed"
    assert "kv_transfer_params" not in rig.decodes[0].requests[-1].json
    assert await rig.metric("pdcluster_fallbacks_total", reason="prefill_failed") == 1


async def test_where_every_prefill_fails_and_the_fallback_is_off_the_answer_is_503(make_rig):
    rig = await make_rig(fallback="none")
    rig.prefills[0].faults = [Fault(status=500)] * 2
    reply = await rig.client.post(CHAT, json=BODY)
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "service_unavailable_error"
    assert rig.decodes[0].requests == []


@pytest.mark.parametrize(
    "handoff",
    [None, [], {}, "text", {"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_block_ids": []}],
    ids=str,
)
async def test_a_reply_without_a_usable_handoff_is_a_counted_fallback(rig, handoff):
    rig.prefills[0].faults = [Fault(handoff=handoff)]
    reply = await rig.client.post(CHAT, json=BODY)
    assert reply.headers["x-pdcluster-path"] == "aggregated; reason=no_handoff"
    assert "kv_transfer_params" not in rig.decodes[0].requests[0].json
    assert await rig.metric("pdcluster_fallbacks_total", reason="no_handoff") == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "fault",
    [Fault(status=500), Fault(close_before_headers=True), Fault(body=b'{"half', cut_body=True)],
    ids=["500", "reset", "cut"],
)
async def test_a_decode_that_fails_before_the_first_byte_costs_a_new_prefill_never_a_second_use(
    make_rig, fault, stream
):
    rig = await make_rig(decodes=2)
    for engine in rig.decodes:
        engine.faults = [fault] if engine is rig.decodes[0] else []
    statuses = [(await rig.client.post(CHAT, json={**BODY, "stream": stream})).status_code for _ in range(4)]
    assert set(statuses) == {200}
    assert len(rig.decodes[0].faults) == 0
    assert len(rig.prefills[0].requests) == 5
    assert await rig.metric("pdcluster_retries_total", leg="decode") == 1
    # An engine that answers has told prefill itself.
    assert await rig.metric("pdcluster_handoffs_stranded_total") == fault.close_before_headers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_decode_that_keeps_failing_is_a_real_http_error(rig, stream):
    body = b'{"error":{"message":"engine dead"}}'
    rig.decodes[0].faults = [Fault(status=500, body=body)] * 2
    reply = await rig.client.post(CHAT, json={**BODY, "stream": stream})
    assert (reply.status_code, reply.content) == (500, body)
    assert len(rig.prefills[0].requests) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_decode_4xx_is_passed_on_with_its_status_and_body_even_where_a_stream_was_asked_for(rig, stream):
    rig.decodes[0].faults = [Fault(status=400, body=ERROR)]
    reply = await rig.client.post(CHAT, json={**BODY, "stream": stream})
    assert (reply.status_code, reply.content) == (400, ERROR)
    assert reply.headers["content-type"] == "application/json"
    assert len(rig.prefills[0].requests) == 1


async def test_a_non_streamed_answer_that_is_cut_twice_is_502(rig):
    rig.decodes[0].faults = [Fault(body=b'{"half', cut_body=True)] * 2
    reply = await rig.client.post(CHAT, json=BODY)
    assert reply.status_code == 502
    assert "decode: d0 broke off" in reply.json()["error"]["message"]


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
FAILED = b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n'


@pytest.mark.parametrize(
    ("route", "events"),
    [
        (CHAT, [FAILED, b"data: [DONE]\n\n"]),
        (CHAT, [ROLE, FAILED, b"data: [DONE]\n\n"]),
        (CHAT, [ROLE + FAILED]),
        (CHAT, [ROLE]),
        (CHAT, []),
        ("/v1/completions", [b": comment\n\n", FAILED]),
        ("/v1/responses", [b'event: response.created\ndata: {"a":1}\n\n', b'event: error\ndata: {"error":{"message":"KV load failed"}}\n\n']),
        ("/v1/messages", [b"event: message_start\ndata: {}\n\n", b'event: error\ndata: {"error":{"message":"KV load failed"}}\n\n']),
    ],
)  # fmt: skip
async def test_an_error_at_the_beginning_of_a_stream_is_an_http_error_not_a_200(rig, route, events):
    rig.decodes[0].faults = [Fault(events=events)] * 2
    reply = await rig.client.post(route, json=STREAM)
    assert reply.status_code == 502
    assert len(rig.prefills[0].requests) == 2
    assert "KV load failed" in reply.text or "before its first event" in reply.text


async def test_an_error_at_the_beginning_of_a_stream_is_mended_by_a_second_attempt(rig):
    rig.decodes[0].faults = [Fault(events=[ROLE, FAILED])]
    reply, lines = await lines_of(rig.client, STREAM)
    assert reply.status_code == 200
    assert lines[-1] == "data: [DONE]"
    assert sum('"role"' in line for line in lines) == 1


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fault", [Fault(close_after=4), Fault(end_after=4)], ids=["reset", "ended"])
async def test_a_stream_that_breaks_after_the_first_byte_ends_with_an_error_event_and_no_retry(rig, route, fault):
    rig.decodes[0].faults = [fault]
    reply, lines = await lines_of(rig.client, STREAM, route)
    assert reply.status_code == 200
    assert "data: [DONE]" not in lines
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["message"].startswith("decode: ")
    assert (lines[-2] == "event: error") == (route in ("/v1/responses", "/v1/messages"))
    assert len(rig.prefills[0].requests) == 1
    assert await rig.metric("pdcluster_requests_total", outcome="upstream_aborted", route=route) == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_cut_into_single_bytes_arrives_the_same_and_complete(rig, route):
    rig.decodes[0].faults = [Fault(byte_by_byte=True)]
    cut = await rig.client.post(route, json=STREAM)
    whole = await rig.client.post(route, json=STREAM)
    assert cut.content == whole.content
    assert await rig.metric("pdcluster_requests_total", outcome="ok", route=route) == 2


async def test_each_event_arrives_when_the_engine_sends_it(rig):
    rest = asyncio.Event()
    rig.decodes[0].faults = [Fault(hold=rest, pause_after=3)]
    async with rig.client.stream("POST", CHAT, json=STREAM) as reply:
        lines = reply.aiter_lines()
        async with asyncio.timeout(5):
            while '"tok"' not in await anext(lines):
                pass
        assert not rest.is_set()
        rest.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_during_prefill_ends_it_and_decode_is_never_called(rig, stream):
    rig.prefills[0].faults = [Fault(hold=asyncio.Event())]
    await leave(rig, rig.prefills[0], {**BODY, "stream": stream})
    assert rig.decodes[0].requests == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_before_decodes_first_byte_ends_decode(rig, stream):
    rig.decodes[0].faults = [Fault(hold=asyncio.Event())]
    await leave(rig, rig.decodes[0], {**BODY, "stream": stream})
    assert await rig.metric("pdcluster_handoffs_stranded_total") == 0


async def leave(rig, engine, body):
    call = asyncio.create_task(rig.client.post(CHAT, json=body))
    await asyncio.wait_for(engine.arrived.wait(), 5)
    call.cancel()
    await asyncio.wait_for(engine.gone.wait(), 1)
    await rig.idle()
    assert await rig.metric("pdcluster_requests_total", outcome="client_cancelled") == 1


async def test_a_client_that_leaves_mid_stream_ends_decode(rig):
    rig.decodes[0].faults = [Fault(hold=asyncio.Event(), pause_after=3)]
    async with rig.client.stream("POST", CHAT, json=STREAM) as reply:
        await anext(reply.aiter_lines())
    await asyncio.wait_for(rig.decodes[0].gone.wait(), 1)
    await rig.idle()
    assert await rig.metric("pdcluster_requests_total", outcome="client_cancelled") == 1


@pytest.mark.parametrize(
    ("leg", "more"), [("prefill", {"prefill": 0.05}), ("decode", {"headers": 0.05})], ids=["prefill", "decode"]
)
async def test_an_engine_that_is_silent_too_long_is_504_and_the_leg_is_named(make_rig, leg, more):
    from proxy.config import Timeouts

    rig = await make_rig(timeouts=Timeouts(connect=1, **more))
    engine = rig.prefills[0] if leg == "prefill" else rig.decodes[0]
    engine.faults = [Fault(hold=asyncio.Event())]
    reply = await rig.client.post(CHAT, json=STREAM)
    assert reply.status_code == 504
    assert reply.json()["error"]["message"].startswith(f"{leg}: ")
    await rig.idle()


async def test_a_stream_that_falls_silent_ends_with_an_error_event(make_rig):
    from proxy.config import Timeouts

    rig = await make_rig(timeouts=Timeouts(connect=1, idle=0.05))
    rig.decodes[0].faults = [Fault(hold=asyncio.Event(), pause_after=3)]
    _, lines = await lines_of(rig.client, STREAM)
    assert "gave nothing for 0.05 s" in lines[-1]


async def test_many_mixed_requests_leave_nothing_in_flight(make_rig):
    rig = await make_rig(prefills=2, decodes=2)
    for engine in rig.prefills + rig.decodes:
        engine.faults = [
            Fault(),
            Fault(status=500),
            Fault(),
            Fault(status=400, body=ERROR),
            Fault(close_before_headers=True),
        ]

    async def one(index):
        call = asyncio.create_task(rig.client.post(CHAT, json=STREAM if index % 2 else BODY))
        if index % 5 == 0:
            await asyncio.sleep(0)
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    await asyncio.gather(*(one(index) for index in range(60)))
    await rig.idle()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt_list"),
        ({"prompt": [[1, 2], [3]]}, "prompt_list"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"background": True}, "background"),
    ],
)
async def test_what_cannot_be_split_runs_on_decode_alone_with_the_reason(rig, more, reason):
    body = {"model": "m", "prompt": "x", **more}
    reply = await rig.client.post("/v1/completions", json=body)
    assert reply.headers["x-pdcluster-path"] == f"aggregated; reason={reason}"
    assert rig.prefills[0].requests == []
    assert rig.decodes[0].requests[0].json == body
    assert await rig.metric("pdcluster_aggregated_requests_total", reason=reason) == 1
    assert await rig.metric("pdcluster_fallbacks_total") == 0


@pytest.mark.parametrize("prompt", ["x", ["x"], [1, 2, 3], [[1, 2, 3]]])
async def test_one_prompt_in_whatever_form_is_split(rig, prompt):
    reply = await rig.client.post("/v1/completions", json={"model": "m", "prompt": prompt, "n": 1, "echo": False})
    assert reply.headers["x-pdcluster-path"] == "disaggregated"


async def test_latency_metrics_are_counted_once_a_request(rig):
    await rig.client.post(CHAT, json=STREAM)
    await rig.client.post(CHAT, json=BODY)
    for name, count in (
        ("queue", 2),
        ("prefill", 2),
        ("handoff", 1),
        ("time_to_first_token", 1),
        ("time_per_output_token", 1),
        ("request", 2),
    ):
        assert await rig.metric(f"pdcluster_{name}_seconds_count") == count, name


async def test_a_refused_connection_fails_over_at_once(make_rig):
    rig = await make_rig(decodes=2, health_interval=30)
    await rig.decodes[0].stop()
    replies = await asyncio.gather(*(rig.client.post(CHAT, json=BODY) for _ in range(8)))
    assert {reply.status_code for reply in replies} == {200}
    assert await rig.metric("pdcluster_endpoint_state", endpoint="d0", state="unhealthy") == 1


async def test_nothing_is_listening_anywhere(make_rig):
    rig = await make_rig()
    await rig.decodes[0].stop()
    reply = await rig.client.post(CHAT, json=BODY)
    assert reply.status_code in (502, 503)
    assert isinstance(reply.json()["error"]["message"], str)
    with pytest.raises(httpx.HTTPError):
        await httpx.AsyncClient().get(rig.decodes[0].url)
