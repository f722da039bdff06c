"""Whatever a client sends, the proxy answers below 500 (or passes an engine's own answer on), stays ready, forgets it.

Examples are derived from the tests alone, so that each run has the same. They run in a thread, since the stand-ins
live on the test's loop. What each example left behind (protocol kept, nothing in flight) is checked after each test.
"""

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from proxy.app import create_app
from proxy.config import EndpointConfig, ProxyConfig
from tests.stand_in.engine import LIMIT_FIELDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
ROUTES = st.sampled_from([*LIMIT_FIELDS, "/tokenize", "/v1/embeddings", "/v1/messages/count_tokens"])


def bounded(examples):
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


@asynccontextmanager
async def unharmed(rig, caplog):
    """Check that whatever happens in a block is no bug, and that the proxy serves on after it."""
    async with rig.counts("pdcluster_requests_total", 0, outcome="internal_error"):
        yield
    assert "bug while" not in caplog.text
    assert "Exception in ASGI" not in caplog.text
    assert (await rig.client.get("/ready")).status_code == 200
    assert (await rig.client.post(CHAT, json=GOOD)).headers["x-pdcluster-path"] == "disaggregated"


async def fuzz(rig, caplog, test):
    """Run a hypothesis test that takes a client, in a thread."""

    def run():
        with httpx.Client(base_url=rig.client.base_url, timeout=5, trust_env=False) as client:
            test(client)

    async with unharmed(rig, caplog):
        await asyncio.to_thread(run)


def fine(reply):
    """Tell whether an answer is none of our own failures; errors of ours are JSON in the API's shape."""
    if reply.status_code >= 500:
        return False
    return reply.status_code < 400 or bool(reply.json()["error"]["message"])


NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-2, 3) | st.floats() | st.sampled_from([10**400, 1e308, -0.0])
SCALARS = (
    st.none() | st.booleans() | NUMBERS | st.text(max_size=12) | st.sampled_from(["\ud83d", "true", "", "0", "\x00"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    [
        *["model", "messages", "prompt", "input", "stream", "stream_options", "n", "best_of", "echo", "logprobs"],
        *["prompt_logprobs", "prompt_embeds", "use_beam_search", "background", "store", "previous_response_id", "stop"],
        *["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "kv_transfer_params", "vllm_xargs"],
        *["ec_transfer_params", "return_token_ids", "ignore_eos", "tools", "seed", "temperature", "top_logprobs"],
    ]
)
OBJECTS = st.dictionaries(FIELDS | st.text(max_size=6), VALUES, max_size=8)


async def test_any_json_is_answered(shared, caplog):
    def run(client):
        @bounded(250)
        @given(ROUTES, OBJECTS | VALUES, st.booleans())
        def each(route, value, good_first):
            body = {**GOOD, **value} if good_first and isinstance(value, dict) else value
            assert fine(client.post(route, content=json.dumps(body)))

        each()

    await fuzz(shared, caplog, run)


async def test_any_bytes_are_answered(shared, caplog):
    valid = json.dumps({**GOOD, "stream": True, "x": [1.5, {"é": None}]}, ensure_ascii=False).encode()

    def run(client):
        @bounded(200)
        @given(
            ROUTES,
            st.integers(0, len(valid)),
            st.integers(0, 6),
            st.binary(max_size=6)
            | st.sampled_from([b"{" * 300, b"\xff", b'"', b"\x00", b"NaN", b'"a":1,', b"9" * 5000]),
        )
        def each(route, at, cut, put):
            assert fine(client.post(route, content=valid[:at] + put + valid[at + cut :]))

        each()

    await fuzz(shared, caplog, run)


async def test_keys_that_come_twice_are_answered_and_agree_on_both_legs(shared, caplog):
    def run(client):
        @bounded(80)
        @given(st.lists(st.tuples(FIELDS, SCALARS), min_size=1, max_size=6), ROUTES)
        def each(pairs, route):
            body = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in pairs * 2)
            assert fine(client.post(route, content="{" + body + "}"))

        each()

    await fuzz(shared, caplog, run)


@pytest.mark.parametrize("depth", [1, 60, 127, 128, 129, 1000, 200_000])
async def test_any_depth_is_answered(shared, caplog, depth):
    async with unharmed(shared, caplog):
        for left, right in ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"":', b"}]")):
            body = b'{"messages":' + left * depth + b"1" + right * depth + b"}"
            assert fine(await shared.client.post(CHAT, content=body))
            assert fine(await shared.client.post(CHAT, content=body[: len(body) // 2]))


TOKENS = st.sampled_from(
    [
        *[
            "content-type",
            "accept",
            "accept-encoding",
            "authorization",
            "x-request-id",
            "x-data-parallel-rank",
            "cookie",
        ],
        *["traceparent", "tracestate", "x-session-id", "x-vllm-priority", "range", "if-none-match", "origin", "via"],
        *["anthropic-version", "x-forwarded-proto", "content-encoding", "connection", "upgrade", "te", "x-api-key"],
    ]
)
HEADER_VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40).map(
    str.strip
)


async def test_any_headers_are_answered(shared, caplog):
    def run(client):
        @bounded(150)
        @given(ROUTES, st.lists(st.tuples(TOKENS, HEADER_VALUES), max_size=6), st.booleans())
        def each(route, headers, stream):
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            reply = client.post(route, content=json.dumps({**GOOD, "stream": stream}), headers=raw)
            assert fine(reply)
            assert len(reply.headers.get_list("x-request-id")) == 1 or reply.status_code >= 400

        each()

    await fuzz(shared, caplog, run)


METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PURGE"])
PATHS = st.text(st.sampled_from("/v1chat.completions%20aZ-_~;:@&=+$,?#[]!'()*é"), max_size=20) | ROUTES


async def test_any_method_on_any_path_is_answered(shared, caplog):
    def run(client):
        @bounded(150)
        @given(METHODS, PATHS)
        def each(method, path):
            url = client.base_url.copy_with(raw_path=quote("/" + path.lstrip("/"), safe="/%?&=+$,;:@~()'!*").encode())
            reply = client.request(method, url, json=GOOD)
            assert reply.status_code < 500

        each()

    await fuzz(shared, caplog, run)


LINES = [
    *[
        b"",
        b"\r\n",
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"\x00" * 100,
    ],
    *[
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://evil/ HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    *[
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
        b"GET /health HTTP/1.1\r\na: " + b"x" * 300_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    ],
    *[
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\n: v\r\n\r\n",
        b"GET /health HTTP/1.1\r\na b: v\r\n\r\n",
        b"GET /health HTTP/1.1\r\n folded\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    ],
]
FRAMES = [
    *[
        b"content-length: -1\r\n\r\n{}",
        b"content-length: x\r\n\r\n{}",
        b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"content-length: 2, 2\r\n\r\n{}",
        b"content-length: 99999999999999999999999\r\n\r\n{}",
    ],
    *[
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        b"transfer-encoding: gzip\r\n\r\n{}",
    ],
    *[
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
        b"content-length: 50\r\n\r\n{}",
        b"transfer-encoding: chunked\r\n\r\n2\r\n{}",
        b"\r\n{}",
    ],
    *[
        b"expect: something\r\ncontent-length: 2\r\n\r\n{}",
        b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\nsec-websocket-version: 13\r\ncontent-length: 2\r\n\r\n{}",
    ],
]


def spoken(port, sent):
    """Send bytes, say that there are no more, and return all that comes until the proxy closes; in bounded time."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        got = b""
        try:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                got += part
        except (ConnectionError, BrokenPipeError):
            pass  # it may refuse to read on
    return got


async def test_what_is_no_http_neither_ends_nor_hangs_the_proxy(shared, caplog):
    sent = [*LINES, *[b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\n" + frame for frame in FRAMES]]
    async with unharmed(shared, caplog):
        for raw in sent:
            got = await asyncio.to_thread(spoken, shared.port, raw)
            assert not got or got.startswith(b"HTTP/1."), raw[:60]
            assert not got.startswith(b"HTTP/1.1 5"), raw[:60]


async def test_bytes_of_two_requests_that_disagree_about_their_length_reach_no_engine_as_a_third(shared, caplog):
    hidden = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n" + b'{"prompt":"bad"}'
    async with unharmed(shared, caplog):
        for frame in (
            b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"transfer-encoding: chunked\r\ncontent-length: %d\r\n\r\n0\r\n\r\n" % (5 + len(hidden)),
        ):
            await asyncio.to_thread(
                spoken, shared.port, b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\n" + frame + hidden
            )
        assert not [seen for seen in shared.prefills[0].requests if b"bad" in seen.raw]


async def test_any_first_bytes_neither_end_nor_hang_the_proxy(shared, caplog):
    words = st.sampled_from(
        [
            b"GET ",
            b"POST ",
            b"/health",
            CHAT.encode(),
            b" HTTP/1.1",
            b"\r\n",
            b"\n",
            b": ",
            b"content-length",
            b"transfer-encoding",
            b"chunked",
            b"2",
            b"{}",
            b"host",
        ]
    )

    def run(_):
        @bounded(150)
        @given(st.lists(words | st.binary(max_size=4), max_size=14).map(b"".join))
        def each(sent):
            got = spoken(shared.port, sent)
            assert not got or got.startswith(b"HTTP/1.")
            assert not got.startswith(b"HTTP/1.1 5")

        each()

    await fuzz(shared, caplog, run)


LOOSE = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": {"type": "array", "items": {"type": "object"}},
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        "stream": {"type": "boolean"},
        "n": {"type": "integer"},
        "max_tokens": {"type": "integer"},
    },
}


def document():
    """Return the proxy's OpenAPI document; where it says nothing of a body, with a loose schema of it."""
    app = create_app(ProxyConfig(endpoints=(EndpointConfig("d0", "http://127.0.0.1:1", "decode"),)))
    value = json.loads(json.dumps(app.openapi()))
    for methods in value["paths"].values():
        if "post" in methods:
            methods["post"].setdefault("requestBody", {"content": {"application/json": {"schema": LOOSE}}})
    return value


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
async def test_no_operation_of_our_openapi_document_answers_a_5xx_of_its_own(shared, caplog, mode):
    schema = schemathesis.openapi.from_dict(document())
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {
        *LIMIT_FIELDS,
        "/v1/models",
        "/health",
        "/ready",
        "/metrics",
    }

    def run(client):
        for operation in operations:
            if mode is GenerationMode.NEGATIVE and operation.method == "get":
                continue  # there is nothing to be wrong about

            @bounded(4)
            @given(operation.as_strategy(generation_mode=mode))
            def each(case):
                sent = case.as_transport_kwargs(base_url=str(client.base_url).rstrip("/"))
                reply = client.request(
                    sent["method"],
                    sent["url"],
                    content=json.dumps(sent["json"]) if "json" in sent else sent.get("data"),
                    headers={name: value for name, value in sent["headers"].items() if name.lower() == "content-type"},
                    params=sent.get("params"),
                )
                assert reply.status_code < 500

            each()

    await fuzz(shared, caplog, run)
