"""Reported failures of the kind: a handoff used twice, used by another prompt, or lost without anybody noticing."""

import asyncio

import pytest

from tests.stand_in.engine import LIMIT_FIELDS, Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ROUTES = pytest.mark.parametrize("route", LIMIT_FIELDS)

# What a decode that has read the request can do before the client has a byte.
AFTER_THE_BODY = {
    "closes": Fault(close_before_headers=True),
    "resets": Fault(close_before_headers=True, reset=True),
    "sends half a status line": Fault(raw=b"HTTP/1.1 20"),
    "sends half its headers": Fault(raw=b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"),
    "answers 500": Fault(status=500),
    "answers 503": Fault(status=503),
    "cuts its body": Fault(body=b'{"half', cut_body=True),
    "cuts its stream": Fault(close_after=0),
    "ends its stream at once": Fault(end_after=0),
}


def handoffs(rig):
    """Return the ids of the handoffs that decode got, in order."""
    found = [seen.json.get("kv_transfer_params") for seen in rig.decodes[0].requests]
    return [handoff and handoff["remote_request_id"] for handoff in found]


@STREAMS
@ROUTES
@pytest.mark.parametrize("what", AFTER_THE_BODY)
async def test_once_decode_may_have_a_handoff_the_next_try_brings_another_also_on_a_reused_connection(
    shared, what, route, stream
):  # B01; each rig's violations say so too
    if not stream and "stream" in what:
        return
    assert (await shared.client.post(route, json={**BODY, "stream": stream})).status_code == 200  # opens connections
    shared.decodes[0].faults = [AFTER_THE_BODY[what]]
    reply = await shared.client.post(route, json={**BODY, "stream": stream})
    await shared.ready()
    assert reply.status_code == 200
    assert len(shared.prefills[0].requests) == 3
    assert len(set(handoffs(shared))) == len(handoffs(shared)) == 3
    ids = [seen.headers["x-request-id"] for seen in shared.decodes[0].requests]
    assert len(set(ids)) == 3


@STREAMS
async def test_a_decode_that_resets_an_idle_connection_before_reading_costs_no_client_an_error(shared, stream):  # B01
    for _ in range(4):
        await shared.client.post(CHAT, json={**BODY, "stream": stream})
        shared.decodes[0].reset_reused = 1
        assert (await shared.client.post(CHAT, json={**BODY, "stream": stream})).status_code == 200
        await shared.ready()
    assert len(set(handoffs(shared))) == len(handoffs(shared))


async def test_a_prefill_that_resets_an_idle_connection_costs_neither_an_error_nor_the_handoff(shared):  # B01, B13
    for _ in range(4):
        await shared.client.post(CHAT, json=BODY)
        shared.prefills[0].reset_reused = 1
        reply = await shared.client.post(CHAT, json=BODY)
        await shared.ready()
        assert reply.headers["x-pdcluster-path"] == "disaggregated"


async def test_engines_that_close_idle_connections_after_a_moment_cost_no_request(shared):
    for engine in (shared.prefills[0], shared.decodes[0]):
        engine.keep_alive_s = 0.01
    for index in range(8):
        reply = await shared.client.post(CHAT, json={**BODY, "stream": bool(index % 2)})
        assert reply.status_code == 200
        await shared.until(lambda: _closed(shared))


async def _closed(rig):
    """Tell whether no connection is left but those of probes that run right now."""
    return all(len(engine.connections) <= 1 for engine in rig.prefills + rig.decodes)


async def test_many_at_once_never_share_or_swap_a_handoff(shared):  # B01, B02
    shared.decodes[0].faults = [Fault(), Fault(status=503), Fault(), Fault(status=400, body=b"{}")] * 10
    bodies = [{**BODY, "user": f"u{index}", "stream": bool(index % 2)} for index in range(40)]
    await asyncio.gather(*(shared.client.post(CHAT, json=body) for body in bodies))
    prefilled = {seen.headers["x-request-id"]: seen.json["user"] for seen in shared.prefills[0].requests}
    for seen in shared.decodes[0].requests:
        assert prefilled[seen.headers["x-request-id"]] == seen.json["user"]
    assert len(set(handoffs(shared))) == len(handoffs(shared))


UNUSABLE = {
    "null": None,
    "false": False,
    "a list": [],
    "a list of one": lambda handoff: [handoff],
    "empty": {},
    "text": "remote",
    "a number": 7,
    "nested": lambda handoff: {"kv_transfer_params": handoff},
    "not for decode": lambda handoff: {**handoff, "do_remote_prefill": False},
    "true as text": lambda handoff: {**handoff, "do_remote_prefill": "true"},
    "without blocks": lambda handoff: {**handoff, "remote_block_ids": None},
    "blocks as text": lambda handoff: {**handoff, "remote_block_ids": "1,2"},
    "port as text": lambda handoff: {**handoff, "remote_port": "5600"},
    "engine as a number": lambda handoff: {**handoff, "remote_engine_id": 5},
    "host null": lambda handoff: {**handoff, "remote_host": None},
} | {
    f"without {name}": lambda handoff, name=name: {key: value for key, value in handoff.items() if key != name}
    for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "do_remote_prefill")
}


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_an_unusable_handoff_is_never_sent_and_decode_serves_alone_with_a_count(shared, kind):  # B13
    shared.prefills[0].faults = [Fault(handoff=UNUSABLE[kind])]
    async with shared.counts("pdcluster_fallbacks_total", 1, reason="no_handoff"):
        reply = await shared.client.post(CHAT, json=BODY)
    assert reply.headers["x-pdcluster-path"] == "aggregated; reason=no_handoff"
    assert "kv_transfer_params" not in shared.decodes[0].requests[0].json


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"text", b'{"kv_transfer_params":', b"\xff"], ids=repr)
async def test_a_prefill_that_answers_nonsense_is_a_counted_fallback(shared, body):  # B13
    shared.prefills[0].faults = [Fault(body=body or b" ")]
    async with shared.counts("pdcluster_fallbacks_total", 1):
        reply = await shared.client.post(CHAT, json=BODY)
    assert reply.status_code == 200
    assert reply.headers["x-pdcluster-path"].startswith("aggregated; reason=")


async def test_whatever_else_a_handoff_has_reaches_decode_verbatim(shared):  # B13
    more = {
        "dcp_size": 1,
        "new_field": {"a": [None, 1.5, "é"]},
        "remote_num_tokens": 2**53 + 1,
        "transfer_mode": "pull",
    }
    shared.prefills[0].faults = [Fault(handoff=lambda handoff: {**handoff, **more})]
    await shared.client.post(CHAT, json=BODY)
    got = shared.decodes[0].requests[0].json["kv_transfer_params"]
    assert {name: got[name] for name in more} == more


@pytest.mark.parametrize(
    "how",
    [{"byte_by_byte": True}, {"chunked": True}, {"until_close": True}, {"gzip": True}, {"interim": b"HTTP/1.1 100 Continue\r\n\r\n"}, {"headers": {"content-type": "text/plain"}}],
    ids=str,
)  # fmt: skip
async def test_a_handoff_is_read_however_its_answer_is_framed(shared, how):  # B13
    for _ in range(3):
        shared.prefills[0].faults = [Fault(**how)]
        assert (await shared.client.post(CHAT, json=BODY)).headers["x-pdcluster-path"] == "disaggregated"


@ROUTES
async def test_each_api_moves_kv_and_says_so(shared, route):  # B13
    async with shared.counts("pdcluster_fallbacks_total", 0), shared.counts("pdcluster_aggregated_requests_total", 0):
        assert (await shared.client.post(route, json=BODY)).headers["x-pdcluster-path"] == "disaggregated"
    assert handoffs(shared)[0] in shared.wire.issued


async def test_strict_mode_answers_503_where_no_kv_would_move(make_rig):  # B13
    rig = await make_rig(fallback="none")
    for fault in (Fault(handoff=None), Fault(body=b"nonsense"), Fault(handoff={"do_remote_prefill": True})):
        rig.prefills[0].faults = [fault]
        reply = await rig.client.post(CHAT, json={**BODY, "stream": True})
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
    assert rig.decodes[0].requests == []
