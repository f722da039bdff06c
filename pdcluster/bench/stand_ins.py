"""Engines for benchmarks: one process, many ports, the wire shape of vLLM 0.32 with NIXL, no model.

usage: python -m pdcluster.bench.stand_ins PREFILL_PORTS DECODE_PORTS ALONE_PORTS     (comma-separated)

A prefill port answers with a handoff. A decode port wants one (a port that serves alone doesn't); it streams
`max_tokens` events, one write each, `seed` milliseconds apart (every router passes that field on), or answers with one
JSON body. Whatever breaks the protocol is counted and told by GET /breaches.
"""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from typing import Any

import orjson
import uvloop

from pdcluster.bench.http import Incoming

_BACKLOG = 4096
_GIANT = 1 << 20
_NUMBER = re.compile(rb"\s*(\d+)")
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODEL = {"id": "m", "object": "model", "max_model_len": 1 << 20}
_METRICS = b'vllm:num_requests_running{model_name="m"} 0.0\nvllm:num_requests_waiting{model_name="m"} 0.0\n'


class Tally:
    """What all ports have seen."""

    def __init__(self) -> None:
        self.prefills = 0
        self.decodes = 0
        self.breaches: dict[str, int] = {}
        self.open: set[str] = set()  # handoffs that were given and not used yet

    def breach(self, what: str) -> None:
        """Count a breach of the protocol."""
        self.breaches[what] = self.breaches.get(what, 0) + 1

    def told(self) -> dict[str, Any]:
        """Return the counts."""
        return {"prefills": self.prefills, "decodes": self.decodes, "breaches": self.breaches}


class StandIn(asyncio.Protocol):
    """One connection to an engine of a role."""

    def __init__(self, role: str, tally: Tally) -> None:
        self._role = role
        self._tally = tally
        self._incoming = Incoming()
        self._transport: asyncio.Transport | None = None
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """End what is being streamed."""
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer every whole request."""
        self._incoming.add(data)
        while (message := self._incoming.take()) is not None:
            head, body = message
            self._answer(head[: head.find(b"\r")].split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path == b"/breaches":
            self._send(self._tally.told())
        elif path.startswith(b"/v1/models"):
            self._send({"object": "list", "data": [_MODEL]})
        elif path.startswith(b"/metrics"):
            self._send_bytes(_METRICS, b"text/plain; version=0.0.4")
        elif not body:
            self._send({})
        elif self._role == "prefill":
            self._prefill(_fields(body))
        else:
            self._decode(_fields(body))

    def _prefill(self, request: dict[str, Any]) -> None:
        tally = self._tally
        tally.prefills += 1
        if request.get("max_tokens") != 1 and request.get("max_completion_tokens") != 1:
            tally.breach("prefill of more than one token")
        if not (request.get("kv_transfer_params") or {}).get("do_remote_decode"):
            tally.breach("prefill without being asked to keep KV")
        handoff_id = f"chatcmpl-{uuid.uuid4().hex}"
        tally.open.add(handoff_id)
        handoff = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3, 4]],
            "remote_engine_id": "stand-in",
            "remote_request_id": handoff_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": 100,
        }
        self._send(_completion(handoff_id, " a", 1) | {"kv_transfer_params": handoff})

    def _decode(self, request: dict[str, Any]) -> None:
        tally = self._tally
        tally.decodes += 1
        handoff_id = (request.get("kv_transfer_params") or {}).get("remote_request_id")
        if self._role == "decode" and handoff_id not in tally.open:
            tally.breach("decode without a handoff that is good")
        tally.open.discard(handoff_id)
        tokens = int(request.get("max_tokens") or 16)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        if request.get("stream"):
            self._streaming = asyncio.ensure_future(self._stream(answer_id, tokens, request.get("seed") or 0))
        else:
            self._send(_completion(answer_id, " tok" * tokens, tokens))

    async def _stream(self, answer_id: str, tokens: int, pace: int) -> None:
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._write(head)
        for index in range(tokens):
            event = b"data: " + orjson.dumps(_event(answer_id, index, last=index == tokens - 1)) + b"\n\n"
            self._write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(pace / 1000)
        self._write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _send(self, value: dict[str, Any]) -> None:
        self._send_bytes(orjson.dumps(value), b"application/json")

    def _send_bytes(self, body: bytes, kind: bytes) -> None:
        self._write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _fields(body: bytes) -> dict[str, Any]:
    """Return the fields that matter; of a giant only these are looked for, so that no stream of ours waits for it."""
    if len(body) < _GIANT:
        fields: dict[str, Any] = orjson.loads(body)
        return fields
    start = body.rfind(b'"kv_transfer_params":')
    params = orjson.loads(body[start + 21 : body.find(b"}", start) + 1]) if start >= 0 else None
    tokens = body.rfind(b'"max_tokens":')
    return {"max_tokens": int(_NUMBER.match(body, tokens + 13)[1]), "kv_transfer_params": params}  # type: ignore[index]


def _completion(answer_id: str, text: str, tokens: int) -> dict[str, Any]:
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens},
    }


def _event(answer_id: str, index: int, *, last: bool) -> dict[str, Any]:
    choice = {
        "index": 0,
        "delta": {"content": f" tok{index}"},
        "logprobs": None,
        "finish_reason": "length" if last else None,
    }
    return {"id": answer_id, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


async def serve(prefill: list[int], decode: list[int], alone: list[int]) -> None:
    """Listen on all ports for ever."""
    loop, tally = asyncio.get_running_loop(), Tally()
    for role, ports in (("prefill", prefill), ("decode", decode), ("alone", alone)):
        for port in ports:
            await loop.create_server(lambda role=role: StandIn(role, tally), "127.0.0.1", port, backlog=_BACKLOG)  # type: ignore[misc]
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(*([int(port) for port in part.split(",")] for part in sys.argv[1:4])))
