"""Simulated engines on the wire: vLLM's shapes, handoffs that live and die, metrics, clients that leave."""

import asyncio
import json
import socket
from dataclasses import replace

import httpx
import pytest

from pdcluster.errors import UserError
from pdcluster.simulation.profile import EngineProfile
from pdcluster.simulation.server import Serving, served
from pdcluster.simulation.wire_engine import Clocks

PLAIN = EngineProfile()
SHORT = replace(PLAIN, decode_base_s=0.001, decode_seq_s=0.0)
TEXT = "word" * 512


def chat(text, max_tokens, **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}


def events(text):
    """Return the events of a stream as JSON, [DONE] as it is."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def until(condition):
    async with asyncio.timeout(5):
        while not (value := await condition()):
            await asyncio.sleep(0.005)
    return value


async def test_a_chat_is_answered_whole_in_vllms_shape(serving):
    async with serving() as client:
        reply = await client.post("decode-0", chat(TEXT, 3), **{"X-Request-Id": "mine"})
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-mine-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": " t t t"}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 512,
        "completion_tokens": 3,
        "total_tokens": 515,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["kv_transfer_params"] is None


async def test_a_stream_has_an_event_for_each_token_usage_where_asked_and_done(serving):
    async with serving(profile=SHORT) as client:
        reply = await client.post("decode-0", chat(TEXT, 3, stream=True, stream_options={"include_usage": True}))
        plain = await client.post("decode-0", {"prompt": "a", "max_tokens": 2, "stream": True}, "/v1/completions")
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(reply.text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": " t"},
        {"content": " t"},
        {"content": " t"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (512, 3)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in events(plain.text)[:-1]] == [" t", " t"]


async def test_a_handoff_goes_from_prefill_to_decode_and_frees_the_kv_there(serving):
    async with serving() as client:
        first = await client.prefill(TEXT)
        handoff = first["kv_transfer_params"]
        assert handoff["do_remote_prefill"] is True
        assert handoff["do_remote_decode"] is False
        assert handoff["remote_block_ids"] == [[1]]
        assert handoff["remote_num_tokens"] == 512
        assert handoff["remote_request_id"] == first["id"]
        assert {"remote_engine_id", "remote_host", "remote_port", "tp_size", "transfer_mode"} <= handoff.keys()
        assert client.engines.engines["prefill-0"].engine.kept == 1
        second = await client.post("decode-0", chat(TEXT, 4, kv_transfer_params=handoff))
        assert second.json()["choices"][0]["message"]["content"] == " t t t t"
        assert client.engines.engines["prefill-0"].engine.kept == 0
        assert await client.metric("decode-0", "nixl_xfer_time_seconds_count") == 1
        assert await client.metric("decode-0", "nixl_bytes_transferred_sum") == 512 * PLAIN.kv_bytes_per_token
        stats = (await client.get("prefill-0", "/stats")).json()
    assert stats["engines"]["prefill-0"]["prefills"] == stats["engines"]["decode-0"]["fetches"] == 1
    assert stats["cached_share"] == 0


async def test_the_tokens_cached_by_prefill_are_told_by_both_legs(serving):
    async with serving() as client:
        await client.prefill(TEXT + "aaaa")
        again = await client.prefill(TEXT + "bbbb")
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 512}
        handoff = again["kv_transfer_params"]
        assert handoff["remote_prefill_cached_tokens"] == 512
        reply = await client.post("decode-0", chat(TEXT + "bbbb", 2, kv_transfer_params=handoff))
        assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 512}
        assert await client.metric("prefill-0", "prefix_cache_hits_total") == 512
        assert await client.metric("prefill-0", "prefix_cache_queries_total") == 1026


async def test_a_handoff_is_dead_after_one_use_and_after_its_lease(serving):
    async with serving(profile=replace(SHORT, lease_s=0.05)) as client:
        handoff = (await client.prefill(TEXT))["kv_transfer_params"]
        body = chat(TEXT, 2, kv_transfer_params=handoff)
        texts = [(await client.post("decode-0", body)).json()["choices"][0]["message"]["content"] for _ in range(2)]
        late = (await client.prefill(TEXT))["kv_transfer_params"]
        await until(lambda: client.metric("prefill-0", "nixl_num_kv_expired_reqs_total"))
        reply = await client.post("decode-0", chat(TEXT, 2, kv_transfer_params=late))
        assert await client.metric("prefill-0", "nixl_num_notifications_after_expiry_total") == 2
    assert [*texts, reply.json()["choices"][0]["message"]["content"]] == [" t t", " stale stale", " stale stale"]


@pytest.mark.parametrize(
    ("change", "status", "frees"),
    [
        ({"model": "other"}, 404, True),
        ({"max_tokens": 2**31 - 1}, 400, True),
        ({"max_tokens": 0}, 400, False),
        ({"n": 2}, 400, False),
        ({"min_tokens": 9}, 400, False),
        ({"messages": []}, 400, False),
    ],
)
async def test_decode_frees_the_kv_of_what_its_handler_refuses_and_only_of_that(serving, change, status, frees):
    async with serving() as client:
        handoff = (await client.prefill(TEXT))["kv_transfer_params"]
        reply = await client.post("decode-0", chat(TEXT, 4, kv_transfer_params=handoff) | change)
        assert reply.status_code == status
        assert reply.json()["error"]["code"] == status
        assert client.engines.engines["prefill-0"].engine.kept == (0 if frees else 1)


async def test_what_no_engine_can_serve_is_refused(serving):
    async with serving(profile=replace(PLAIN, kv_blocks=2)) as client:
        for body, told in (
            (b"{", "JSON decode error"),
            (b"[]", "must be an object"),
            (b'{"prompt": 5}', "one text or one list"),
            (b'{"prompt": [-1]}', "token id that is none"),
            (b'{"prompt": "a", "kv_transfer_params": 5}', "kv_transfer_params"),
            (json.dumps({"prompt": "x" * 5000, "max_tokens": 1}).encode(), "KV blocks"),
            (b'{"prompt": "a", "max_tokens": 9, "kv_transfer_params": {"do_remote_decode": true}}', "one token"),
        ):
            reply = await client.http.post(client.engines.urls["decode-0"] + "/v1/completions", content=body)
            assert (reply.status_code, told in reply.text) == (400, True), reply.text
        assert (await client.get("decode-0", "/nothing")).status_code == 404
        assert (await client.post("decode-0", {}, "/v1/chat/completions/render")).status_code == 403


async def test_a_fetch_without_a_holder_would_end_a_real_engine(serving):
    async with serving() as client:
        reply = await client.post("decode-0", chat(TEXT, 4, kv_transfer_params={"do_remote_prefill": True}))
        assert (reply.status_code, "a real engine exits" in reply.text) == (500, True)


async def test_an_unknown_holder_fails_as_vllm_fails_it(serving):
    handoff = {
        "do_remote_prefill": True,
        "remote_engine_id": "gone",
        "remote_request_id": "x",
        "remote_block_ids": [[1]],
    }
    async with serving() as client:
        whole = await client.post("decode-0", chat(TEXT, 4, kv_transfer_params=handoff))
        stream = await client.post("decode-0", chat(TEXT, 4, kv_transfer_params=handoff, stream=True))
        assert await client.metric("decode-0", "nixl_num_failed_transfers_total") == 2
    assert whole.status_code == 500
    assert stream.status_code == 200
    assert events(stream.text)[0]["error"]["code"] == 500
    assert events(stream.text)[1] == "[DONE]"


def test_prefill_takes_the_time_of_its_tokens_and_waits_its_turn(serving, in_no_time):
    async def timed():
        async with serving(profile=replace(PLAIN, prefill_tokens_per_s=10_000)) as client:
            loop = asyncio.get_running_loop()
            start = loop.time()

            async def one(text):
                await client.prefill(text)
                return loop.time() - start

            return sorted(await asyncio.gather(one("a" * 4000), one("b" * 4000)))

    # A loop's timers are as fine as its selector: a millisecond.
    assert in_no_time(timed()) == pytest.approx([0.1, 0.2], abs=0.003)


async def test_a_client_that_leaves_a_stream_leaves_nothing_behind(serving):
    async with serving() as client:
        engines = client.engines.engines
        handoff = (await client.prefill(TEXT))["kv_transfer_params"]
        body = chat(TEXT, 5000, stream=True, kv_transfer_params=handoff)
        async with client.http.stream(
            "POST", client.engines.urls["decode-0"] + "/v1/chat/completions", json=body
        ) as got:
            await anext(got.aiter_lines())
            assert engines["decode-0"].engine.running == 1

        async def idle():
            return not engines["decode-0"].engine.running and not engines["decode-0"].engine.cache.used

        await until(idle)


async def test_a_client_that_leaves_during_a_transfer_frees_prefill_once_it_is_over(serving):
    slow = replace(SHORT, transfer_latency_s=0.1)
    async with serving(profile=slow) as client:
        engines = client.engines.engines
        handoff = (await client.prefill(TEXT))["kv_transfer_params"]
        with pytest.raises(httpx.ReadTimeout):
            await client.http.post(
                client.engines.urls["decode-0"] + "/v1/chat/completions",
                json=chat(TEXT, 5, kv_transfer_params=handoff),
                timeout=0.03,
            )
        assert engines["prefill-0"].engine.kept == 1

        async def freed():
            return not engines["prefill-0"].engine.kept and not engines["decode-0"].engine.cache.used

        await until(freed)


async def test_a_client_that_leaves_while_it_waits_frees_prefill_at_once(serving):
    async with serving(profile=replace(PLAIN, max_num_seqs=1)) as client:
        engines = client.engines.engines
        first = asyncio.create_task(client.post("decode-0", chat(TEXT, 40)))
        handoff = (await client.prefill(TEXT))["kv_transfer_params"]
        with pytest.raises(httpx.ReadTimeout):
            await client.http.post(
                client.engines.urls["decode-0"] + "/v1/chat/completions",
                json=chat(TEXT, 5, kv_transfer_params=handoff),
                timeout=0.05,
            )

        async def freed():
            return not engines["prefill-0"].engine.kept

        await until(freed)
        assert not first.done()
        await first


async def test_metrics_show_what_runs_and_waits_under_vllms_names(serving):
    async with serving(profile=replace(PLAIN, max_num_seqs=1)) as client:
        asked = [asyncio.create_task(client.post("decode-0", chat("a", 20))) for _ in range(3)]

        async def full():
            return await client.metric("decode-0", "num_requests_waiting") == 2

        await until(full)
        assert await client.metric("decode-0", "num_requests_running") == 1
        assert await client.metric("decode-0", "kv_cache_usage_perc") == 1.0
        await asyncio.gather(*asked)
        assert await client.metric("decode-0", "generation_tokens_total") == 60
        assert await client.metric("decode-0", "request_success_total") == 3


async def test_a_whole_answer_carries_load_where_that_is_asked_for(serving):
    async with serving() as client:
        reply = await client.post("decode-0", chat("a", 1), **{"endpoint-load-metrics-format": "JSON"})
        text = await client.post("decode-0", chat("a", 1), **{"endpoint-load-metrics-format": "TEXT"})
        without = await client.post("decode-0", chat("a", 1))
    kind, _, report = reply.headers["endpoint-load-metrics"].partition(" ")
    assert kind == "JSON"
    assert json.loads(report)["named_metrics"].keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert text.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_usage_perc=")
    assert "endpoint-load-metrics" not in without.headers


async def test_tokens_are_the_same_however_a_prompt_comes(serving):
    async with serving() as client:
        reply = (await client.post("decode-0", {"model": "m", "prompt": TEXT + "end"}, "/tokenize")).json()
        assert (reply["count"], reply["max_model_len"]) == (513, 131_072)
        chats = (await client.post("decode-0", chat(TEXT + "end", 1), "/tokenize")).json()
        assert chats["tokens"] == reply["tokens"]
        await client.post("decode-0", {"prompt": TEXT, "max_tokens": 1}, "/v1/completions")
        by_id = await client.post("decode-0", {"prompt": reply["tokens"], "max_tokens": 1}, "/v1/completions")
        handed = await client.post("decode-0", chat("", 1, kv_transfer_params={"prompt_token_ids": reply["tokens"]}))
    assert by_id.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 512
    assert handed.json()["usage"]["prompt_tokens"] == 513


async def test_salt_keeps_prefixes_apart(serving):
    async with serving() as client:
        cached = [
            (await client.prefill(TEXT + "end", **more))["usage"]["prompt_tokens_details"]["cached_tokens"]
            for more in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {})
        ]
    assert cached == [0, 0, 512, 512]


async def test_the_small_routes_answer(serving):
    async with serving() as client:
        assert (await client.get("prefill-0", "/health")).status_code == 200
        model = (await client.get("prefill-0", "/v1/models")).json()["data"][0]
        assert (model["id"], model["max_model_len"]) == ("m", 131_072)
        assert (await client.get("prefill-0", "/version")).json() == {"version": "0.32.0"}
        assert (await client.get("prefill-0", "/load")).json() == {"server_load": 0}
        assert (await client.get("prefill-0", "/kv_event_sources")).json() == {}


async def exchanged(client, sent):
    """Return all bytes that a connection answers until it ends."""
    host, port = client.engines.urls["decode-0"].removeprefix("http://").split(":")
    loop, received = asyncio.get_running_loop(), b""
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, int(port)))
        await loop.sock_sendall(connection, sent)
        while more := await loop.sock_recv(connection, 65536):
            received += more
    return received


async def test_requests_on_one_connection_are_answered_in_turn(serving):
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving(profile=SHORT) as client:
        text = await exchanged(client, one + last)
    assert 0 < text.index(b"[DONE]") < text.index(b"0.32.0")


async def test_what_is_not_http_ends_the_connection(serving):
    async with serving() as client:
        assert await exchanged(client, b"nonsense\r\n\r\n") == b""


def test_a_slower_engine_answers_later(serving, in_no_time):
    async def timed():
        async with serving(decode=2, slow={("decode", 1): 6.0}) as client:
            loop = asyncio.get_running_loop()
            start = loop.time()

            async def one(name):
                await client.post(name, chat("a", 10))
                return loop.time() - start

            return await asyncio.gather(one("decode-0"), one("decode-1"))

    quick, slow = in_no_time(timed())
    assert slow == pytest.approx(6 * quick, rel=0.05)


async def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"prefill-0: cannot listen on 127.0.0.1:{port}: .*--port-base"):
            async with served(Serving(1, 0, port_base=port), Clocks(lambda: 0.0, lambda: 0.0)):
                pass
