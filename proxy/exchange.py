"""A request to an engine and its answer, whatever connection carries them.

An exchange is first pulled (`opened`, `take`, `whole`) and may then be piped: from there on each piece goes from the
socket's callback straight into a sink, without a task in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from proxy.errors import EngineFailedError, EngineTimeoutError

# Bytes that a pulled stream may hold before its engine is made to wait.
_HIGH_WATER = 1 << 18


class Limit(NamedTuple):
    """How long to wait for an engine, None for ever; `total` is the whole request's limit where that comes first."""

    seconds: float | None
    total: float | None = None

    def __str__(self) -> str:
        if self.total is not None:
            return f"was not done within the request's {self.total:g} s"
        return f"gave nothing for {self.seconds:g} s"


class Sink(Protocol):
    """Takes a piped stream; all is called from the socket's callback and must neither block nor raise."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        ...

    def chunk(self, data: bytes, start: int) -> bool:
        """Take what looks like one chunk: its size line, the next bytes of the body from `start` on, a line break.

        False says that it was not taken, for what it holds or because its end is none; it will be fed.
        """
        ...

    def end(self, error: EngineFailedError | None) -> None:
        """Hear that nothing more comes, and why if that is too early; called once."""
        ...


class Connection(Protocol):
    """What carries an exchange."""

    def pause_reading(self) -> None:
        """Read nothing more for now."""
        ...

    def resume_reading(self) -> None:
        """Read again."""
        ...

    def drop(self) -> None:
        """Cut it."""
        ...

    def pass_chunks(self, take: Callable[[bytes, int], bool]) -> None:
        """Offer chunks that come alone to this, as they are, from now on; the rest goes to the exchange as before."""
        ...

    def wait_until(self, moment: float | None) -> None:
        """Have the exchange expire at a moment (monotonic seconds), or no more."""
        ...


class Exchange:
    """A request and its answer. `who` names leg and endpoint in errors; `status` is 0 until the headers are there.

    `last` is when the last bytes of a piped stream came (monotonic seconds); its connection stamps it.
    `untouched` is true where a connection that was reused broke before any byte of an answer: the engine had closed it
    as idle, and what can be asked twice may be asked again.
    """

    __slots__ = (
        "_connection",
        "_idle",
        "_names",
        "_pieces",
        "_sink",
        "_timer",
        "_waiter",
        "_whole",
        "complete",
        "error",
        "headers",
        "last",
        "paused",
        "status",
        "untouched",
    )

    def __init__(self, connection: Connection, leg: str, endpoint: str, whole: bool = False) -> None:
        self._names = (leg, endpoint)
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.untouched = False
        self.paused = False
        self.error: EngineFailedError | None = None
        self._connection = connection
        self._pieces: list[bytes] = []
        self._whole = whole
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self.last = 0.0
        self._idle: Callable[[], Limit] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def who(self) -> str:
        """Leg and endpoint, for errors."""
        leg, endpoint = self._names
        return f"{leg}: {endpoint}"

    @property
    def piped(self) -> bool:
        """Tell whether a sink takes what comes."""
        return self._sink is not None

    async def opened(self, limit: Limit) -> None:
        """Wait for status and headers, or for the whole answer; raises `EngineFailedError`."""
        while not (self.complete if self._whole else self.status):
            await self._wait(limit, limit.seconds)

    async def take(self, limit: Limit) -> bytes:
        """Return the next bytes of the body, none at its end; raises `EngineFailedError`."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait(limit, limit.seconds)
        data = self._joined()
        self.resume()
        return data

    async def whole(self, limit: Limit, since: float) -> bytes:
        """Return all of the body that is still to come, within a limit that counts from `since` (monotonic seconds)."""
        self._whole = True
        self.resume()
        while not self.complete:
            left = None if limit.seconds is None else max(0.0, since + limit.seconds - time.monotonic())
            await self._wait(limit, left)
        return self._joined()

    def arrived(self) -> bytes:
        """Return the body, all of which is there and nobody has taken, without waiting."""
        return self._joined()

    def pipe(self, sink: Sink, idle: Callable[[], Limit]) -> None:
        """Give everything from here on to a sink. `idle` tells how long it may be silent from now on."""
        self._sink = sink
        self._idle = idle
        self.last = time.monotonic()
        if self._pieces:
            sink.feed(self._joined())
        if self.complete or self.error is not None:
            self._end_pipe(self.error)
            return
        self.resume()
        self._connection.pass_chunks(sink.chunk)
        self._watch()

    def pause(self) -> None:
        """Make the engine wait: the sink is full."""
        if not self.paused and not self.complete:
            self.paused = True
            self._connection.pause_reading()

    def resume(self) -> None:
        """Let the engine go on."""
        if self.paused:
            self.paused = False
            self.last = time.monotonic()
            self._connection.resume_reading()

    def close(self) -> None:
        """End the exchange; unless it is complete the connection is cut, which makes the engine stop its work."""
        self._sink = None
        self.error = None  # its traceback refers to whoever holds this
        self._cancel_timer()
        if not self.complete:
            self._connection.drop()

    # What the connection tells.

    def answered(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Take status and headers."""
        self.headers = headers
        self.status = status
        if not self._whole:
            self._wake()

    def put(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self._sink is not None:
            self._sink.feed(data)
            return
        self._pieces.append(data)
        if not self._whole:
            self._wake()
            if sum(map(len, self._pieces)) > _HIGH_WATER:
                self.pause()

    def finish(self) -> None:
        """Hear that the body is complete; whoever this wakes finds the connection free."""
        self._end_pipe(None)
        self._wake()

    def fail(self, error: EngineFailedError) -> None:
        """Note that nothing more will come."""
        if self.complete or self.error is not None:
            return
        self.error = error
        sink = self._sink
        if sink is None:
            self._wake()
            return
        if self._pieces:
            sink.feed(self._joined())
        self._end_pipe(error)

    def _joined(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        return data

    def _end_pipe(self, error: EngineFailedError | None) -> None:
        sink, self._sink = self._sink, None
        self._cancel_timer()
        if sink is not None:
            sink.end(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, limit: Limit, left: float | None) -> None:
        """Wait for something new; `left` is what is left of the limit."""
        if self.error is not None:
            raise self.error
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        if left is not None:
            self._connection.wait_until(time.monotonic() + left)
        try:
            await waiter
        except TimeoutError:
            self.fail(self._late(limit))
        finally:
            self._waiter = None
            if left is not None and not self.complete:
                self._connection.wait_until(None)
        self._raise_unless_pieces()

    def expire(self) -> None:
        """End the wait that is under way: its limit is reached."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def _raise_unless_pieces(self) -> None:
        if self.error is not None and not self._pieces:
            raise self.error

    def _late(self, limit: Limit) -> EngineTimeoutError:
        return EngineTimeoutError(f"{self.who} {limit}", counts=limit.total is None)

    def _watch(self) -> None:
        """Fail a piped stream that was silent for too long, else look again when it could be; no timer a piece."""
        if self._sink is None or self._idle is None:
            return
        limit = self._idle()
        now = time.monotonic()
        if limit.seconds is None:
            return
        since = now if self.paused or limit.total is not None else self.last
        due = since + limit.seconds
        if due <= now:
            self.fail(self._late(limit))
            self._connection.drop()
        else:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._watch)

    def _cancel_timer(self) -> None:
        self._idle = None  # it may refer to whoever holds this exchange
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
