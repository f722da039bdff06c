"""A stand-in for vLLM over real sockets: it checks the NIXL protocol on both legs and plays faults on demand.

Checked on prefill: one token, no stream, nothing that vLLM would refuse there. Checked on decode: a handoff that some
prefill issued, used once, under the same request id. Breaches are kept in `wire.violations`, which tests assert empty.
"""

import asyncio
import json
from dataclasses import dataclass, field

from tests.stand_in.fault import Fault, compressed, normal_events
from tests.stand_in.framing import Seen, read_request, reset, send_events, send_whole

__all__ = ["LIMIT_FIELDS", "Fault", "Seen", "StandIn", "Wire", "normal_events"]

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
# More tokens than any model makes: decode refuses the request, and in doing so tells prefill to free the KV.
RELEASE_TOKENS = 2**31 - 1
REFUSED = b'{"error":{"message":"max_tokens is too large","type":"BadRequestError","code":400}}'


@dataclass
class Wire:
    """What all stand-ins of a test share: the handoffs issued and what was done wrong."""

    issued: dict = field(default_factory=dict)  # handoff id -> request id
    models: dict = field(default_factory=dict)  # handoff id -> the model that prefill was asked for
    attempts: set = field(default_factory=set)  # request ids that prefill has answered
    used: set = field(default_factory=set)
    released: list = field(default_factory=list)  # handoff ids that decode was asked to give back
    violations: list = field(default_factory=list)

    def check(self, condition, text):
        if not condition:
            self.violations.append(text)


class StandIn:
    """One engine. `requests` has the POSTs, `probes` the GETs, `releases` the requests that only give KV back.

    `gone` is set when a client leaves in the middle of an answer, `stalled` when one doesn't read what it asked for.
    """

    def __init__(self, role, wire):
        self.role, self.wire = role, wire
        self.requests, self.probes, self.releases = [], [], []
        self.faults = []  # of the next POSTs, one each
        self.always = Fault()  # of the POSTs after those
        self.get_faults = {}  # path -> Fault of every GET there
        self.gone, self.arrived, self.stalled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.accepting = asyncio.Event()  # until it is set, connections stay unanswered
        self.accepting.set()
        self.health = 200
        self.metrics = ""
        self.models = ["m"]
        self.tokens = 4
        self.keep_alive = True  # else the connection is closed after each answer, without a word
        self.keep_alive_s = None  # seconds after which an idle connection is closed
        self.reset_reused = 0  # so many requests on reused connections meet a reset before they are read
        self.now = self.highest = 0  # POSTs at once
        self.engine_id = f"{role}-{id(self):x}"
        self.connections = set()

    async def start(self, port=0):
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", port, limit=1 << 26, backlog=4096)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self):
        self.server.close()
        for writer in list(self.connections):
            writer.transport.abort()
        await self.server.wait_closed()
        for _ in range(3):  # what was accepted at the last moment reaches _connection
            await asyncio.sleep(0)
        for writer in list(self.connections):
            writer.transport.abort()
        for _ in range(3):  # and their transports close
            await asyncio.sleep(0)

    def forget(self):
        """Be as new, for the next test; connections stay."""
        for record in (self.requests, self.probes, self.releases, self.faults, self.get_faults):
            record.clear()
        for event in (self.gone, self.arrived, self.stalled):
            event.clear()
        self.always, self.health, self.metrics, self.models, self.tokens = Fault(), 200, "", ["m"], 4
        self.keep_alive, self.keep_alive_s, self.reset_reused, self.highest = True, None, 0, self.now
        self.accepting.set()

    async def _connection(self, reader, writer):
        self.connections.add(writer)
        carry, served = b"", 0
        try:
            await self.accepting.wait()
            carry = await reader.read(1)
            while carry:
                if served and self.reset_reused:
                    self.reset_reused -= 1
                    reset(writer)
                    return
                seen = await read_request(reader, carry, reused=bool(served))
                if seen is None:
                    return
                watch = asyncio.ensure_future(reader.read(1))
                watch.add_done_callback(lambda it: it.cancelled() or it.exception())  # what it met is known elsewhere
                work = asyncio.ensure_future(self._counted(seen, writer))
                await asyncio.wait((watch, work), return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and (watch.exception() or watch.result() == b""):
                    seen.left = asyncio.get_running_loop().time()
                    self.gone.set()
                    work.cancel()
                if not await work or not self.keep_alive:
                    watch.cancel()
                    return
                served += 1
                carry = await self._within_keep_alive(watch)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.gone.set()
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _within_keep_alive(self, watch):
        """Return the next request's first byte, nothing where the connection was idle for too long."""
        try:
            return await asyncio.wait_for(watch, self.keep_alive_s)
        except TimeoutError:
            return b""

    async def _counted(self, seen, writer):
        if seen.method == "GET":
            return await self._answer_get(seen, writer)
        self.now += 1
        self.highest = max(self.highest, self.now)
        try:
            return await self._answer(seen, writer)
        finally:
            self.now -= 1

    async def _answer(self, seen, writer):
        """Answer one POST; false where the connection must end."""
        if self._is_release(seen):
            self._check_release(seen)
            return await send_whole(writer, 400, REFUSED, {}, Fault())
        self.requests.append(seen)
        self.arrived.set()
        if seen.path in LIMIT_FIELDS:  # also where a fault follows: what arrived may have been acted on
            (self._check_prefill if self.role == "prefill" else self._check_decode)(seen)
        fault = self.faults.pop(0) if self.faults else self.always
        await fault.before()
        if fault.close_before_headers or fault.raw is not None:
            writer.write(fault.raw or b"")
            await writer.drain()
            if fault.reset:
                reset(writer)
            return False
        echoed = {name: seen.headers[name] for name in ("x-request-id", "x-data-parallel-rank") if name in seen.headers}
        headers = {**echoed, **fault.headers}
        streams = seen.path in LIMIT_FIELDS and self.role == "decode" and seen.json.get("stream")
        if fault.body is None and fault.status == 200 and streams:
            return await self._stream(seen, writer, headers, fault)
        body = self._whole(seen, fault)
        if fault.gzip:
            body, more = compressed(body)
            headers |= more
        return await send_whole(writer, fault.status, body, headers, fault)

    def _whole(self, seen, fault):
        if fault.body is not None or fault.status != 200:
            return fault.body or b"{}"
        if seen.path not in LIMIT_FIELDS:
            return json.dumps({"echo": seen.path, "kv_transfer_params": None}).encode()
        if self.role == "prefill":
            return json.dumps(self._prefill(seen, fault)).encode()
        if fault.gzip:
            return b'{"id":"x"}'
        reply = {"id": "x", "kv_transfer_params": None, "content": "tok" * self.tokens, "prompt_token_ids": None}
        return json.dumps(reply).encode()

    async def _stream(self, seen, writer, headers, fault):
        events = fault.events if fault.events is not None else normal_events(seen.path, self.tokens)
        if fault.gzip:
            body, more = compressed(b"".join(events))
            events, headers = [body], headers | more
        return await send_events(writer, events, headers, fault, seen, self.stalled)

    async def _answer_get(self, seen, writer):
        self.probes.append(seen)
        fault = self.get_faults.get(seen.path, Fault())
        await fault.before()
        if fault.close_before_headers or fault.raw is not None:
            writer.write(fault.raw or b"")
            await writer.drain()
            return False
        kind = {"content-type": "text/plain"} if seen.path == "/metrics" else {}
        status, body = self._own(seen.path)
        if fault.status != 200 or fault.body is not None:
            status, body = fault.status, fault.body or b""
        return await send_whole(writer, status, body, {**kind, **fault.headers}, fault)

    def _own(self, path):
        """Return status and body of a GET."""
        if path == "/health":
            return self.health, b""
        if path == "/v1/models":
            data = [{"id": model, "object": "model"} for model in self.models]
            return 200, json.dumps({"object": "list", "data": data}).encode()
        if path == "/metrics":
            return 200, self.metrics.encode()
        if path == "/load":
            return 200, json.dumps({"server_load": self.now}).encode()
        return 200, b'{"version":"0.32.0"}'

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
        handoff_id = f"{request_id}-{len(self.wire.attempts):08x}"
        self.wire.issued[handoff_id] = request_id
        self.wire.models[handoff_id] = seen.json.get("model")
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
        return {"id": "p", "kv_transfer_params": fault.handed_off(handoff)}

    def _check_decode(self, seen):
        handoff = seen.json.get("kv_transfer_params")
        if handoff is not None:
            self._use(handoff, seen)

    def _use(self, handoff, seen):
        """Check that a handoff may be used, and use it up."""
        check = self.wire.check
        if not isinstance(handoff, dict):
            check(False, f"decode: a handoff that is none: {handoff!r}")
            return
        handoff_id = handoff.get("remote_request_id")
        check(handoff_id in self.wire.issued, "decode: a handoff that nobody issued")
        check(handoff_id not in self.wire.used, "decode: a handoff was used twice")
        check(
            self.wire.issued.get(handoff_id) == seen.headers.get("x-request-id"),
            "decode: another request id than prefill's",
        )
        self.wire.used.add(handoff_id)

    def _is_release(self, seen):
        if self.role != "decode" or seen.path != "/v1/completions":
            return False
        body = seen.json
        handoff, limit = body.get("kv_transfer_params"), body.get("max_tokens")
        return isinstance(handoff, dict) and isinstance(limit, int) and limit >= RELEASE_TOKENS

    def _check_release(self, seen):
        body, check = seen.json, self.wire.check
        handoff_id = body["kv_transfer_params"].get("remote_request_id")
        self._use(body["kv_transfer_params"], seen)
        check(body.get("model") == self.wire.models.get(handoff_id), "release: another model than prefill's")
        check(
            isinstance(body.get("prompt"), list | str) and len(body["prompt"]) == 1, "release: not a one token prompt"
        )
        check(not body.get("stream"), "release: streamed")
        self.releases.append(seen)
        self.wire.released.append(handoff_id)
