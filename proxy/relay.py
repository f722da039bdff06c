"""Engine bytes to the client: what an answer is made of, when a stream is whole, and how it is passed on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.errors import EngineFailedError, ProxyError, error_body
from proxy.request import ApiKind
from proxy.trace import Trace

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_CARRY = 48  # bytes kept from one chunk to the next, longer than any terminator
_DONE = b"data: [DONE]"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client will get: a whole body, or the first bytes of a stream (`body`) and the rest (`chunks`)."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    chunks: AsyncIterator[bytes] | None = None


@dataclass(slots=True)
class StreamEnd:
    """Tells how a stream ended, wherever its chunks are cut.

    `complete`: with the event that its API ends with. `failed`: the engine itself reported an error in it.
    """

    kind: ApiKind
    complete: bool = False
    failed: bool = False
    _carry: bytes = field(default=b"\n")

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        text = self._carry + chunk
        if any(mark in text for mark in self.kind.terminators):
            self.complete = True
        if any(b"\n" + mark in text for mark in self.kind.failures):
            self.failed = True
        self._carry = text[-_CARRY:]


async def send_answer(
    answer: Answer, headers: Mapping[str, str], kind: ApiKind, send: Send, trace: Trace, clock: Callable[[], float]
) -> None:
    """Send an answer with further headers; a stream that breaks off ends with an error event."""
    if answer.chunks is None:
        await send_whole(answer.status, {**answer.headers, **headers}, answer.body, send)
        return
    await _start(answer.status, {**answer.headers, **_STREAM_HEADERS, **headers}, send)
    end = StreamEnd(kind)
    try:
        await _pass_on(answer.body, end, send, trace, clock)
        async for chunk in answer.chunks:
            await _pass_on(chunk, end, send, trace, clock)
        if not end.complete and not end.failed:
            raise EngineFailedError("decode: the engine ended the stream before it was complete")
    except EngineFailedError as error:
        if not end.complete and not end.failed:
            trace.outcome = "upstream_aborted"
            await send({"type": "http.response.body", "body": error_event(error, kind), "more_body": True})
    if end.failed:
        trace.outcome = "upstream_aborted"
    await send({"type": "http.response.body", "body": b""})


async def send_whole(status: int, headers: Mapping[str, str], body: bytes, send: Send) -> None:
    """Send a response whose body is all there."""
    await _start(status, {**headers, "content-length": str(len(body))}, send)
    await send({"type": "http.response.body", "body": body})


def error_event(error: ProxyError, kind: ApiKind) -> bytes:
    """Return an error as a server-sent event; a blank line first closes an event that was cut off."""
    data = orjson.dumps(error_body(error, anthropic=kind.anthropic))
    name = b"event: error\n" if kind.anthropic or kind.route == "/v1/responses" else b""
    return b"\n\n" + name + b"data: " + data + b"\n\n"


async def _start(status: int, headers: Mapping[str, str], send: Send) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def _pass_on(chunk: bytes, end: StreamEnd, send: Send, trace: Trace, clock: Callable[[], float]) -> None:
    end.feed(chunk)
    if end.failed:  # what failed must not end like what succeeded
        chunk = chunk.partition(_DONE)[0]
    trace.complete = end.complete
    trace.events += chunk.count(b"\ndata:") + chunk.startswith(b"data:")
    trace.last_byte = clock()
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
