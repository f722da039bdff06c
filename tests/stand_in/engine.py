"""A stand-in for vLLM over real sockets: it checks the NIXL protocol on both legs and plays faults on demand.

Checked on prefill: one token, no stream, nothing that vLLM would refuse there. Checked on decode: a handoff that some
prefill issued, used once, under the same request id. Breaches are kept in `wire.violations`, which tests assert empty.
"""

import asyncio
import gzip
import json
from dataclasses import dataclass, field

LIMIT_FIELDS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
NOT_ON_PREFILL = (
    "min_tokens",
    "stream_options",
    "stop",
    "stop_token_ids",
    "stop_sequences",
    "logprob_token_ids",  # vLLM refuses it without logprobs, which need not be there either
)


@dataclass
class Wire:
    """What all stand-ins of a test share: the handoffs issued and what was done wrong."""

    issued: dict = field(default_factory=dict)
    attempts: set = field(default_factory=set)  # request ids that prefill has answered
    used: set = field(default_factory=set)
    violations: list = field(default_factory=list)

    def check(self, condition, text):
        if not condition:
            self.violations.append(text)


@dataclass
class Fault:
    """How the next POST goes wrong; what isn't set is normal."""

    status: int = 200
    body: bytes | None = None  # instead of the normal answer
    headers: dict = field(default_factory=dict)
    hold: asyncio.Event | None = None  # wait for it before answering
    close_before_headers: bool = False
    events: list | None = None  # instead of the normal events
    close_after: int | None = None  # break the connection after so many events
    end_after: int | None = None  # end in order after so many events
    pause_after: int | None = None  # then wait for `hold`
    handoff: object = "normal"  # what kv_transfer_params of a prefill's reply is
    byte_by_byte: bool = False
    cut_body: bool = False  # announce more than is sent
    gzip: bool = False  # compress whatever is sent, though nobody asked


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict
    raw: bytes

    @property
    def json(self):
        return json.loads(self.raw)


class StandIn:
    """One engine. `requests` has the POSTs; `gone` is set when a client leaves in the middle of one."""

    def __init__(self, role, wire):
        self.role, self.wire = role, wire
        self.requests, self.gets, self.faults = [], [], []
        self.gone, self.arrived = asyncio.Event(), asyncio.Event()
        self.health = 200
        self.metrics = ""
        self.tokens = 4
        self.keep_alive = True  # else the connection is closed after each answer, without a word
        self.engine_id = f"{role}-{id(self):x}"
        self.connections = set()

    async def start(self):
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 26)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self):
        self.server.close()
        await self.server.wait_closed()
        for _ in range(3):  # what was accepted at the last moment reaches _connection
            await asyncio.sleep(0)
        for writer in list(self.connections):
            writer.transport.abort()
        for _ in range(3):  # and their transports close
            await asyncio.sleep(0)

    async def _connection(self, reader, writer):
        self.connections.add(writer)
        carry = b""
        try:
            while True:
                seen = await _read_request(reader, carry)
                if seen is None:
                    return
                watch = asyncio.ensure_future(reader.read(1))
                work = asyncio.ensure_future(self._answer(seen, writer))
                await asyncio.wait((watch, work), return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and watch.result() == b"":
                    self.gone.set()
                    work.cancel()
                if not await work:
                    watch.cancel()
                    return
                if not self.keep_alive:
                    watch.cancel()
                    return
                carry = await watch
                if not carry:
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.gone.set()
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _answer(self, seen, writer):
        """Answer one request; false where the connection must end."""
        if seen.method == "GET":
            self.gets.append(seen)
            return await self._answer_get(seen, writer)
        self.requests.append(seen)
        self.arrived.set()
        if seen.path in LIMIT_FIELDS:  # also where a fault follows: what arrived may have been acted on
            (self._check_prefill if self.role == "prefill" else self._check_decode)(seen)
        fault = self.faults.pop(0) if self.faults else Fault()
        if fault.hold and fault.pause_after is None:
            await fault.hold.wait()
        if fault.close_before_headers:
            return False
        if seen.path not in LIMIT_FIELDS:
            return await _send(writer, 200, json.dumps({"echo": seen.path, "kv_transfer_params": None}).encode())
        if fault.gzip and not seen.json.get("stream"):
            return await _send(writer, 200, gzip.compress(b'{"id":"x"}'), {"content-encoding": "gzip"})
        if fault.body is not None or fault.status != 200:
            return await _send(writer, fault.status, fault.body or b"{}", fault.headers, cut=fault.cut_body)
        if self.role == "prefill":
            return await _send(writer, 200, json.dumps(self._prefill(seen, fault)).encode(), fault.headers)
        if seen.json.get("stream"):
            return await self._stream(seen.path, writer, fault)
        reply = {"id": "x", "kv_transfer_params": None, "content": "tok" * self.tokens, "prompt_token_ids": None}
        return await _send(writer, 200, json.dumps(reply).encode(), fault.headers)

    async def _answer_get(self, seen, writer):
        if seen.path == "/health":
            return await _send(writer, self.health, b"")
        if seen.path == "/v1/models":
            return await _send(
                writer, 200, json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
            )
        if seen.path == "/metrics":
            return await _send(writer, 200, self.metrics.encode(), {"content-type": "text/plain"})
        return await _send(writer, 200, b'{"version":"0.32.0"}')

    def _check_prefill(self, seen):
        body, check = seen.json, self.wire.check
        check(
            body.get("kv_transfer_params") == {"do_remote_decode": True, "do_remote_prefill": False},
            "prefill: not asked to keep KV",
        )
        first, *others = LIMIT_FIELDS[seen.path]
        check(
            body.get(first) == 1 and all(body.get(name, 1) == 1 for name in others), f"prefill: not one token: {body}"
        )
        check(body.get("stream") is False, "prefill: streamed")
        check(body.get("n", 1) == 1, "prefill: n is not 1")
        check(seen.path != "/v1/responses" or body.get("store") is False, "prefill: would store its answer")
        check(not [name for name in NOT_ON_PREFILL if name in body], f"prefill: has {sorted(body)}")
        request_id = seen.headers.get("x-request-id")
        check(request_id, "prefill: no request id")
        check(request_id not in self.wire.attempts, "prefill: a request id was used for two attempts")

    def _prefill(self, seen, fault):
        request_id = seen.headers.get("x-request-id")
        self.wire.attempts.add(request_id)
        handoff_id = f"{request_id}-{len(self.wire.issued):08x}"
        self.wire.issued[handoff_id] = request_id
        handoff = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": handoff_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }
        return {"id": "p", "kv_transfer_params": handoff if fault.handoff == "normal" else fault.handoff}

    def _check_decode(self, seen):
        handoff, check = seen.json.get("kv_transfer_params"), self.wire.check
        if handoff is None:
            return
        handoff_id = handoff.get("remote_request_id")
        check(handoff_id in self.wire.issued, "decode: a handoff that nobody issued")
        check(handoff_id not in self.wire.used, "decode: a handoff was used twice")
        check(
            self.wire.issued.get(handoff_id) == seen.headers.get("x-request-id"),
            "decode: another request id than prefill's",
        )
        self.wire.used.add(handoff_id)

    async def _stream(self, path, writer, fault):
        events = fault.events if fault.events is not None else normal_events(path, self.tokens)
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nserver: secret\r\ntransfer-encoding: chunked\r\n"
        if fault.gzip:
            head += "content-encoding: gzip\r\n"
            events = [gzip.compress(b"".join(events))]
        writer.write(head.encode() + b"\r\n")
        for index, event in enumerate(events):
            if index == fault.close_after:
                await writer.drain()
                writer.transport.abort()
                return False
            if index == fault.end_after:
                break
            if index == fault.pause_after:
                await writer.drain()
                await fault.hold.wait()
            for piece in [event[i : i + 1] for i in range(len(event))] if fault.byte_by_byte else [event]:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def normal_events(path, tokens):
    """Return the events of a complete stream, in the API's own form."""
    if path == "/v1/responses":
        steps = [
            "response.created",
            "response.in_progress",
            *["response.output_text.delta"] * tokens,
            "response.completed",
        ]
        return [f'event: {step}\ndata: {{"type":"{step}","kv_transfer_params":null}}\n\n'.encode() for step in steps]
    if path == "/v1/messages":
        steps = ["message_start", *["content_block_delta"] * tokens, "message_stop"]
        return [f'event: {step}\ndata: {{"type":"{step}"}}\n\n'.encode() for step in steps]
    first = [b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'] if "chat" in path else []
    return [*first, *[b'data: {"choices":[{"delta":{"content":"tok"}}]}\n\n'] * tokens, b"data: [DONE]\n\n"]


async def _read_request(reader, carry):
    try:
        head = carry + await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
    raw = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, raw)


async def _send(writer, status, body, headers=None, *, cut=False):
    lines = {"content-type": "application/json", "server": "secret", **(headers or {})}
    lines["content-length"] = str(len(body) + (10 if cut else 0))
    head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return not cut
