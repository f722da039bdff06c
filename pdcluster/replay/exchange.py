"""One streamed request on a connection of its own: sent, its events taken apart as they come, nothing kept of them.

An asyncio protocol with httptools' parser: a generator that shares two cores with what it measures must be cheap.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

from pdcluster.errors import UserError

_OK = 200
_DETAIL = 300  # characters kept of what went wrong
_ERROR_BODY = 4096
_LINE = 1 << 20
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "text")


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI endpoint: where it listens, the path before /v1, headers that go with every request."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    prefix: str = ""
    key: str | None = None

    @property
    def origin(self) -> str:
        """The URL that every path is added to."""
        return f"{'https' if self.tls else 'http'}://{self._netloc}{self.prefix}"

    @property
    def _netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def request(self, path: str, body: bytes) -> bytes:
        """Return a request to the byte."""
        authorization = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {self.prefix}{path} HTTP/1.1\r\nhost: {self._netloc}\r\ncontent-type: application/json\r\n"
            f"accept: text/event-stream\r\nconnection: close\r\n{authorization}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def parse_target(url: str, key: str | None = None) -> Target:
    """Return the endpoint of a URL, with or without /v1 at its end; raises `UserError`."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or parts.query or parts.fragment:
        raise UserError(f"{url}: not the URL of an endpoint; give one such as http://127.0.0.1:8000")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Target(parts.hostname, port, tls, parts.path.rstrip("/").removesuffix("/v1"), key)


@dataclass(slots=True)
class Answer:
    """What came of a request so far; times are the clock's.

    `first` and `last` are when an event brought text first and last, `events` how many did. `tokens`, `prompt_tokens`
    and `cached_tokens` are what the usage says, None where it says nothing. `error` is the kind of what went wrong, ""
    for nothing; `detail` its first words.
    """

    status: int | None = None
    first: float | None = None
    last: float | None = None
    events: int = 0
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    complete: bool = False
    error: str = ""
    detail: str = ""

    def fail(self, kind: str, detail: str = "") -> None:
        """Note what went wrong; the first thing that did stays."""
        if not self.error:
            self.error, self.detail = kind, detail[:_DETAIL]

    def take(self, payload: bytes, now: float) -> None:
        """Take the payload of one event."""
        if payload == b"[DONE]":
            self.complete = True
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.fail("event that is not JSON", payload.decode(errors="replace"))
            return
        if not isinstance(event, dict):
            self.fail("event that is not an object", payload.decode(errors="replace"))
        elif event.get("error") is not None:
            self.fail("error event", payload.decode(errors="replace"))
        else:
            self._take_event(event, now)

    def _take_event(self, event: dict[str, Any], now: float) -> None:
        for choice in event.get("choices") or ():
            part = choice.get("delta") or choice
            if any(part.get(key) for key in _TEXTS):
                self.first = now if self.first is None else self.first
                self.last = now
                self.events += 1
        usage = event.get("usage")
        if usage:
            self.tokens, self.prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


class _Connection(asyncio.Protocol):
    """A connection for one request; `over` is done when there is nothing more to come."""

    def __init__(self, request: bytes, answer: Answer, clock: Callable[[], float], over: asyncio.Future[None]) -> None:
        self._request = request
        self._answer = answer
        self._clock = clock
        self._over = over
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]
        self._request = b""

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._answer.fail("not HTTP", str(error))
            self._end()

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        held = self._held + body
        if self._answer.status != _OK:
            self._held = held[:_ERROR_BODY]
            return
        start = 0
        while (stop := held.find(b"\n", start)) >= 0:
            if held.startswith(b"data:", start):
                self._answer.take(held[start + 5 : stop].strip(), self._now)
            start = stop + 1
        self._held = held[start:]
        if len(self._held) > _LINE:
            self._answer.fail("line without an end", f"more than {_LINE} bytes")
            self._end()

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer.status != _OK:
            answer.fail(f"HTTP {answer.status}", self._held.decode(errors="replace"))
        elif not answer.complete:
            answer.fail("stream without its end", self._held.decode(errors="replace"))
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over.done():
            self._answer.fail("connection closed", str(exc or ""))
            self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)


async def ask(target: Target, request: bytes, answer: Answer, clock: Callable[[], float]) -> None:
    """Send a request and take its answer; what goes wrong is noted in the answer, nothing is raised."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    try:
        transport, _ = await loop.create_connection(
            lambda: _Connection(request, answer, clock, over), target.host, target.port, ssl=target.tls
        )
    except OSError as error:
        answer.fail("no connection", str(error))
        return
    try:
        await over
    finally:
        transport.abort()
