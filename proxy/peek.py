"""Read the first events of a stream before the client is told 200.

vLLM 0.32 answers 200 before it knows whether the KV arrived, and puts a failure into the stream: after a role chunk in
chat, after `response.created` in responses. Such events are held back until the first that means something.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from proxy.errors import EngineFailedError
from proxy.request import ApiKind

_LONGEST_PEEK = 1 << 20
_CLIENT_ERRORS = range(400, 500)
_FAILED = "decode: the engine reported an error in its stream"


class RefusedEvent(Exception):  # noqa: N818 - an outcome, no failure of ours or the engine's
    """The first event says that the request itself was wrong; `status` and `body` are the engine's answer to it."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


async def first_events(take: Callable[[], Awaitable[bytes]], kind: ApiKind) -> bytes:
    """Return the bytes up to and including the first event that is no preamble; `take` gives the next ones.

    Raises `RefusedEvent` for an error that is the client's, `EngineFailedError` for any other. Bytes are returned
    as they came; a stream that ends before such an event has failed.
    """
    held = b""
    looked_at = 0
    while chunk := await take():
        held += chunk
        while (cut := _event_end(held, looked_at)) is not None:
            event, looked_at = held[looked_at:cut].lstrip(b"\r\n"), cut
            if event.startswith(kind.failures):
                raise _failure(event)
            if event and not event.startswith(b":") and not any(mark in event for mark in kind.preamble):
                return held
        if len(held) > _LONGEST_PEEK:
            return held
    raise EngineFailedError("decode: the engine ended the stream before its first event")


def _event_end(data: bytes, start: int) -> int | None:
    """Return where the event that begins at `start` ends (after its blank line), None if it isn't all there."""
    ends = [end + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (end := data.find(mark, start)) >= 0]
    return min(ends) if ends else None


def _failure(event: bytes) -> Exception:
    """Return the error that an error event stands for, with the engine's words."""
    _, _, data = event.partition(b"data:")
    try:
        error = json.loads(data).get("error", {})
    except (ValueError, AttributeError):
        error = {}
    if not isinstance(error, dict):
        return EngineFailedError(_FAILED, said=str(error))
    if error.get("code") in _CLIENT_ERRORS:
        return RefusedEvent(error["code"], data.strip())
    return EngineFailedError(_FAILED, said=str(error.get("message", "")))
