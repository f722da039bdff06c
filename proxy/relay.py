"""Engine bytes to the client: what an answer is made of, when a stream is whole, and how it is passed on.

Once a chunk: handoff fields are cut out where the API has them, events are counted, and the end is looked for. Nothing
else belongs here (the time is stamped where the bytes come in).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import orjson

from proxy.client import Client
from proxy.errors import EngineFailedError, ProxyError, error_body
from proxy.exchange import Exchange, Limit
from proxy.firewall import EventCleaner
from proxy.request import ApiKind
from proxy.trace import Trace

_CARRY = 48  # bytes kept from one chunk to the next, longer than any terminator
_DONE = b"data: [DONE]"
# How an event's data begin.
_BEGINNING = b"\ndata:"
# How events of chat and completions begin, and how long the end of one in a chunk of its own is.
_ORDINARY = b'data: {"id":'
_END = len(b"\n\n\r\n")
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EngineStream(NamedTuple):
    """The rest of a stream, and how long it may be silent from now on."""

    exchange: Exchange
    idle: Callable[[], Limit]


class Answer(NamedTuple):
    """What the client will get: a whole body, or the first bytes of a stream (`body`) and the rest."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: EngineStream | None = None


class Relay:
    """What becomes of a stream's bytes on their way, wherever its chunks are cut.

    `complete`: it had the event that its API ends with. `failed`: the engine itself reported an error in it.
    """

    __slots__ = (
        "_aligned",
        "_carry",
        "_cleaner",
        "_clock",
        "_failures",
        "_heads",
        "_terminators",
        "_trace",
        "complete",
        "failed",
        "kind",
    )

    def __init__(self, kind: ApiKind, trace: Trace, clock: Callable[[], float]) -> None:
        self.kind = kind
        self.complete = False
        self.failed = False
        self._trace = trace
        self._clock = clock
        self._cleaner = EventCleaner() if kind.echoes_request else None
        self._terminators = kind.terminators
        self._failures = tuple(b"\n" + mark for mark in kind.failures)
        self._heads = tuple(mark.removeprefix(b"\n") for mark in kind.terminators + kind.failures)
        # Where every mark begins a `data:` line, one event alone in a chunk can only be a mark at its beginning.
        self._aligned = self._cleaner is None and all(mark.startswith(b"data:") for mark in self._heads)
        self._carry = b"\n"

    def takes(self, data: bytes, start: int) -> bool:
        """Count a chunk that is one event, neither the last one nor an error; False says that it must be fed."""
        if (
            self._carry == b"\n"
            and data.startswith(_ORDINARY, start)
            and data.find(b"\n", start) == len(data) - _END
            and data.endswith(b"\n\n\r\n")
            and self._aligned
        ):
            self._trace.events += 1
            return True
        return False

    def feed(self, data: bytes) -> bytes:
        """Return what the client gets of the next bytes."""
        if self._cleaner is not None:
            data = self._cleaner.feed(data)
        if data.startswith(b"data:") and _BEGINNING not in data:
            whole = data.endswith(b"\n\n") and self._carry.endswith(b"\n")
            if whole and self._aligned and not data.startswith(self._heads):
                self._trace.events += 1
                self._carry = b"\n"
                return data
        if self.complete and not self.failed:
            return data
        return self._examined(data)

    def _examined(self, data: bytes) -> bytes:
        """Count events, look for the end and for errors, also across chunks."""
        text = self._carry + data
        self._trace.events += text.count(_BEGINNING) - self._carry.count(_BEGINNING)
        self._carry = text[-_CARRY:]
        for mark in self._terminators:
            if mark in text:
                self.complete = self._trace.complete = True
        for mark in self._failures:
            if mark in text:
                self.failed = True
        if self.failed:  # what failed must not end like what succeeded
            return data.partition(_DONE)[0]
        return data

    def end(self, error: EngineFailedError | None) -> bytes:
        """Return the last bytes: an error event where the stream broke off."""
        rest = b"" if self._cleaner is None else self._cleaner.rest()
        if rest:
            rest = self._examined(rest)
        if error is None:
            self._trace.last_byte = self._clock()
        if error is None and not self.complete and not self.failed:
            error = EngineFailedError("decode: the engine ended the stream before it was complete")
        if error is not None and not self.complete and not self.failed:
            self._trace.outcome = "upstream_aborted"
            return rest + error_event(error, self.kind)
        if self.failed:
            self._trace.outcome = "upstream_aborted"
        return rest


async def send_answer(
    answer: Answer,
    headers: Mapping[str, str],
    kind: ApiKind,
    client: Client,
    trace: Trace,
    clock: Callable[[], float],
) -> None:
    """Send an answer with further headers; a stream that breaks off ends with an error event."""
    if answer.stream is None:
        await client.respond(answer.status, {**answer.headers, **headers}, answer.body)
        return
    await client.start(answer.status, {**answer.headers, **_STREAM_HEADERS, **headers})
    await client.relay(answer.body, answer.stream.exchange, answer.stream.idle, Relay(kind, trace, clock))


def error_event(error: ProxyError, kind: ApiKind) -> bytes:
    """Return an error as a server-sent event; a blank line first closes an event that was cut off."""
    data = orjson.dumps(error_body(error, anthropic=kind.anthropic))
    name = b"event: error\n" if kind.anthropic or kind.route == "/v1/responses" else b""
    return b"\n\n" + name + b"data: " + data + b"\n\n"
