"""uvicorn's HTTP protocol and more: limits on slow clients, whole bodies, streams written straight to the socket.

A request's scope carries a `LinkedClient`, through which a stream goes from an engine's socket to the client's. An
application may have routes that need no more than that (`direct`): they are called without a scope, a cycle and the
layers of ASGI. Everything else is uvicorn's: parsing, keep-alive, pipelining, the ASGI task.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, Protocol

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.client import EXTENSION
from proxy.config import ClientLimits
from proxy.errors import (
    BadRequestError,
    HeadersTooLargeError,
    ProxyError,
    SlowClientError,
    error_body,
)
from proxy.linked_client import LinkedClient, Turn

_LOG = logging.getLogger("proxy.client_protocol")
# A body must come at this pace at least, measured over each `ClientLimits.body_seconds`.
_SLOWEST_BODY = 1024
_LINGER_S = 2.0
_GOODBYE_S = 0.5
# Requests that a client may send before their turn: after so many nothing more is read; with so many in one read it is
# refused. Of a body before its turn hardly more than so many bytes are read.
_PIPELINE, _MOST_PIPELINED = 16, 256
_BODY_AHEAD = 1 << 16
_Awaited = Literal["head", "body", ""]
_Headers = dict[bytes, bytes]


class DirectRoute(Protocol):
    """A route that is served without ASGI; only POST."""

    def serve(self, client: LinkedClient, method: str, headers: _Headers) -> Coroutine[Any, Any, None]:
        """Answer a request; of a header that occurs twice the last value counts."""
        ...


def protocol_class(limits: ClientLimits) -> type[asyncio.Protocol]:
    """Return the protocol with its limits, as uvicorn's `http` setting takes it."""
    return functools.partial(ClientProtocol, limits)  # type: ignore[return-value]


class ClientProtocol(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, limits: ClientLimits, *args: Any, **kwargs: Any) -> None:
        self._fields: _Headers = {}
        self.on_header = self._fields.__setitem__  # type: ignore[method-assign,assignment]  # no call of ours
        super().__init__(*args, **kwargs)
        self._direct: Mapping[bytes, DirectRoute] = getattr(self.app, "direct", {})
        self._waiting: deque[tuple[LinkedClient, DirectRoute, _Headers] | None] = deque()  # None: see `pipeline`
        self._limits = limits
        self._receiving: LinkedClient = None  # type: ignore[assignment]  # set before any body comes
        self._clients: deque[LinkedClient] = deque()  # the one that is served, then pipelined ones
        self._idle_since = 0.0
        self._in_head = False
        self._in_body = False
        self._awaited: _Awaited = ""
        self._head_size = 0
        self._body_seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._offered = False  # the head that was read has an offer to go on otherwise than by HTTP/1.1
        self._declined = False
        self._refusal: ProxyError | None = None
        self._refused = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client its time for a first request."""
        super().connection_made(transport)
        self._await("head")

    def data_received(self, data: bytes) -> None:
        """Parse, then see to what is still incomplete."""
        if self._refused:
            return
        self._head_size += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._misread()
            return
        except httptools.HttpParserUpgrade as offer:
            if not self._decline(data[offer.args[0] :]):
                return
        if self._refused or self.transport.is_closing():
            return
        if not (self._in_head or self._in_body):
            self._head_size = 0
        elif self._head_size > self._limits.head_bytes:
            self.refuse(self._too_much_head())
            return
        awaited: _Awaited = "head" if self._in_head else "body" if self._in_body else ""
        if awaited != self._awaited:
            self._await(awaited)

    def _decline(self, rest: bytes) -> bool:
        """Begin a request anew without its offer (`Upgrade`): httptools takes one that has it to have no body.

        Java's own client offers h2c in every first request. The connection ends with the answer, and whatever follows
        the request is dropped. False says that it was refused.
        """
        if self.parser.get_method() == b"CONNECT":
            self.refuse(BadRequestError("CONNECT is not served here"))
            return False
        kept = [item for item in self._fields.items() if item[0].lower() not in (b"upgrade", b"connection")]
        lines = b"".join([b"%b: %b\r\n" % item for item in kept])
        version = self.parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%bconnection: close\r\n\r\n" % (self.parser.get_method(), self.url, version, lines)
        self._offered, self._declined = False, True
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(head + rest)
        except httptools.HttpParserError:
            self._misread()
        return not self._refused

    def _misread(self) -> None:
        """Refuse what is not HTTP, except behind a request whose offer was declined."""
        if not self._declined or self._in_head or self._in_body:
            self.send_400_response("this is not HTTP/1.1")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request's client."""
        super().connection_lost(exc)
        self._disarm()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._stalled is not None:
            self._stalled.cancel()
        for client in list(self._clients):
            client.left()
        # These refer to us, and only a slow collection would free the lot.
        self._clients.clear()
        self._waiting.clear()
        self.on_header = self.cycle = self.parser = self._receiving = None  # type: ignore[assignment,method-assign]

    def pause_writing(self) -> None:
        """Make the engine wait, but not for ever: a client that never reads would hold its KV."""
        super().pause_writing()
        if self._clients:
            self._clients[0].pause()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Let the engine go on."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._clients:
            self._clients[0].resume()

    # httptools

    def on_message_begin(self) -> None:
        """Note that a head has begun; whatever was awaited has come."""
        if self._awaited:
            self._await("")
        self.url = b""
        self._fields.clear()
        self._in_head = True
        self._in_body = False

    def on_headers_complete(self) -> None:
        """Begin the request."""
        self._in_head = False
        parser = self.parser
        if parser.should_upgrade():
            self._offered = True
            return
        self._in_body = True
        if self._head_size > self._limits.head_bytes:  # else it cannot be
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self._fields.items())
            if size > self._limits.head_bytes:
                self._refusal = self._too_much_head()
                raise self._refusal
        if len(self._clients) > _MOST_PIPELINED:
            self._refusal = BadRequestError(f"more than {_MOST_PIPELINED} requests are ahead of their answers")
            raise self._refusal
        headers = {name.lower(): value.rstrip(b" \t") for name, value in self._fields.items()}
        route = self._direct.get(self.url) if parser.get_method() == b"POST" else None
        queued = self.cycle is not None and not self.cycle.response_complete
        if route is None:
            self._begin_by_asgi(headers, queued=queued)
        else:
            self._begin(route, headers, queued=queued)
        if len(self._clients) <= _PIPELINE:
            self.flow.resume_reading()  # a client is only known to have left while its socket is read
        else:
            self.flow.pause_reading()

    def _begin(self, route: DirectRoute, headers: _Headers, *, queued: bool) -> None:
        parser = self.parser
        chunked = parser.get_http_version() != "1.0"
        expects = b"expect" in headers and headers[b"expect"].lower() == b"100-continue"
        turn = Turn(
            self.transport,
            self.flow,
            self.server_state.default_headers,
            self.on_response_complete,
            keep_alive=chunked and parser.should_keep_alive(),
            expects_100=expects,
        )
        self.cycle = turn  # type: ignore[assignment]
        self._receiving = client = LinkedClient(turn, chunked=chunked)
        self._clients.append(client)
        if queued:
            self._waiting.append((client, route, headers))
        else:
            self._start(client, route, headers)

    def _start(self, client: LinkedClient, route: DirectRoute, headers: _Headers) -> None:
        task = self.loop.create_task(route.serve(client, "POST", headers))
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Close the connection where the answer broke off: the client must not take it for whole."""
        self.tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            if not task.cancelled():
                _LOG.error("an answer broke off", exc_info=task.exception())
            self._close()

    def _begin_by_asgi(self, headers: _Headers, *, queued: bool) -> None:
        """Have uvicorn begin the request, its client in its scope."""
        url = self.url
        super().on_message_begin()
        self.url = url
        self.headers.extend(headers.items())
        self.expect_100_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        super().on_headers_complete()
        if queued:
            self._waiting.append(None)
        cycle = self.cycle
        chunked = self.scope["http_version"] != "1.0"
        client = LinkedClient(cycle, chunked=chunked, send=cycle.send, scope=self.scope)  # type: ignore[arg-type]
        self.scope["extensions"] = {EXTENSION: client}  # type: ignore[dict-item]
        self._receiving = client
        self._clients.append(client)

    def on_body(self, body: bytes) -> None:
        """Gather up to the limit; what comes after the answer is dropped."""
        client = self._receiving
        client.size += len(body)
        self._head_size = 0
        if self.cycle.response_complete:
            return
        client.pieces.append(body)
        if client.size > self._limits.body_bytes:
            self.flow.pause_reading()
            client.wake()
        elif client.size > _BODY_AHEAD and client is not self._clients[0]:
            self.flow.pause_reading()  # until its turn: see `on_response_complete`

    def on_message_complete(self) -> None:
        """Note that the request is all there."""
        if self._offered:
            return
        self._in_body = False
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()
            self._receiving.wake()

    # uvicorn

    def on_response_complete(self) -> None:
        """Let a refused client send on for a moment only."""
        self._clients.popleft().part()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._close()
            return
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self._waiting:
            following = self._waiting.popleft()
            if following is None:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._start(*following)
        elif self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()
        if self._in_body and self.cycle.response_complete:
            self._arm(_LINGER_S, self._close)

    def _should_upgrade(self) -> bool:
        return False  # there are no WebSockets here

    def _unset_keepalive_if_required(self) -> None:
        """Leave the timer armed: it looks whether the connection is idle, and one timer does for many requests."""

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for long enough, else look again when it could be."""
        idle = 0.0 if self._clients or self._in_head else self.loop.time() - self._idle_since
        if self.transport.is_closing():
            return
        if idle >= self.timeout_keep_alive:
            self._close()
        else:
            left = self.timeout_keep_alive - idle
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)

    def shutdown(self) -> None:
        """End an idle connection; one with TLS doesn't wait long for its client's goodbye."""
        super().shutdown()
        if self._refused:
            self._close()
        if self.transport.is_closing():
            self.loop.call_later(_GOODBYE_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or what a callback refused."""
        self.refuse(self._refusal or BadRequestError(msg))

    def refuse(self, error: ProxyError) -> None:
        """Answer with an error, unless a response has begun, and close."""
        if not self._clients or not self._clients[0].answered:
            body = orjson.dumps(error_body(error, anthropic=False))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self._refused = True
        for client in list(self._clients):
            client.left()
        if self.transport.can_write_eof():  # closing at once could cost a client that still sends its answer
            self.transport.write_eof()
            self.flow.resume_reading()
            self._arm(_LINGER_S, self._close)
        else:
            self._close()

    def _too_much_head(self) -> ProxyError:
        return HeadersTooLargeError(f"the headers are over {self._limits.head_bytes} bytes")

    def _close(self) -> None:
        """Close once all is written, but wait for a client that reads nothing no longer than for any other."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._arm(self._limits.write_seconds, self.transport.abort)

    # Timers: one at a time, armed only where something stays incomplete.

    def _await(self, awaited: _Awaited) -> None:
        """Give the client its time for what is incomplete."""
        self._disarm()
        self._awaited = awaited
        if awaited == "head":
            self._arm(self._limits.head_seconds, self._head_is_late)
        elif awaited == "body":
            self._body_seen = self._receiving.size
            self._arm(self._limits.body_seconds, self._check_pace)

    def _arm(self, seconds: float, callback: Callable[[], object]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, callback)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._in_head:
            self.refuse(SlowClientError(f"the headers took over {self._limits.head_seconds:g} s"))
        else:
            self._close()

    def _check_pace(self) -> None:
        self._timer = None
        if not self._in_body:
            return
        came = self._receiving.size - self._body_seen
        if came < _SLOWEST_BODY * self._limits.body_seconds and not self.flow.read_paused:
            self.refuse(SlowClientError(f"the body came at under {_SLOWEST_BODY} bytes a second"))
            return
        self._body_seen = self._receiving.size
        self._arm(self._limits.body_seconds, self._check_pace)
