"""Follow one publisher: every batch once and in order, whatever is lost, repeated or restarted on the way.

Numbers begin at 0 with each start of an engine. A gap is closed by a replay, for which the batch before the gap is
asked again: if it is not what was applied then, the engine is another one now. The same question, asked while nothing
comes, shows that nothing was missed and that the engine is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import zmq
import zmq.asyncio

from proxy.config import KvEventSource
from proxy.kv_events.feed import Feed
from proxy.kv_events.wire import SEQUENCE_BYTES, BatchDecoder, sequence_of

_LOG = logging.getLogger("proxy.kv_events")
_FRAMES = 3
_QUEUED = 100_000  # messages that wait in memory; vLLM's own limit on the other side
_LARGEST = 64 * 1024 * 1024
_AT_ONCE = 64  # batches between which other tasks have their turn
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5000
# Replays for one gap: vLLM's socket drops what is more than about a thousand messages ahead of a slow reader.
_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: of silence until one asks, of the longest pause where nobody answers, between replayed batches."""

    quiet: float = 5.0
    longest: float = 60.0
    reply: float = 2.0


@dataclass(slots=True)
class Progress:
    """How a publisher is followed.

    `answered` is the time of the last sign that nothing is missing (-inf: never). `complete` is true where every batch
    since the engine's start is known; without it, what the index says is there, but there may be more.
    """

    answered: float = float("-inf")
    complete: bool = False
    batches: int = 0
    gaps: int = 0
    restarts: int = 0
    garbage: int = 0


class _RestartedError(Exception):
    """The batch that was asked for again is another one: so is the engine."""


class Follower:
    """Keeps one publisher's part of the index true, for as long as `run` runs."""

    def __init__(
        self,
        source: KvEventSource,
        feed: Feed,
        context: zmq.asyncio.Context,
        clock: Callable[[], float],
        patience: Patience,
    ) -> None:
        self.progress = Progress()
        self._source = source
        self._feed = feed
        self._context = context
        self._clock = clock
        self._patience = patience
        self._decoder = BatchDecoder()
        self._next = 0  # the number of the batch to apply
        self._last = 0  # hash of the one before
        self._live = -1  # the last number that was published to us
        self._misses = 0

    @property
    def current(self) -> bool:
        """Tell whether the publisher was heard of lately, or answered that there is nothing new."""
        return self._clock() - self.progress.answered < 3 * self._patience.quiet

    async def run(self) -> None:
        """Follow for ever; raises `zmq.ZMQError` where an address cannot be used. At the end all is forgotten."""
        socket = self._context.socket(zmq.SUB)
        try:
            _prepare(socket, _QUEUED)
            socket.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            socket.connect(self._source.publish)
            arrived: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
            await self._check()
            while True:
                if await socket.poll(int(1000 * self._pause())):
                    await self._drain(arrived)
                else:
                    await self._check()
        finally:
            socket.close()
            self._feed.clear()

    def _pause(self) -> float:
        return min(self._patience.quiet * 2.0**self._misses, self._patience.longest)

    async def _drain(self, socket: zmq.Socket[bytes]) -> None:
        """Apply what has arrived."""
        for _ in range(_AT_ONCE):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            number = sequence_of(frames[1]) if len(frames) == _FRAMES else None
            if number is None:
                self.progress.garbage += 1
            else:
                await self._published(number, frames[2])
        await asyncio.sleep(0)

    async def _published(self, number: int, payload: bytes) -> None:
        restarted, self._live = number <= self._live, number
        if restarted or number > self._next:
            self.progress.gaps += not restarted
            if not await self._check():
                self._begin(number)  # the gap stays; what was removed in it is not known
        if number == self._next:  # else a replay brought it, or it is from before a restart
            self._apply(number, payload)
            self._misses = 0
            self.progress.answered = self._clock()

    async def _check(self) -> bool:
        """Bring in what was missed; True where the publisher answered, so that nothing is missing now."""
        if self._source.replay is None:
            self._misses += 1
            return False
        answered = False
        for _ in range(_ROUNDS):
            before = self._next
            try:
                answered = await self._catch_up(self._source.replay)
            except _RestartedError:
                self.progress.restarts += 1
                _LOG.info("%s: restarted, or further ahead than it can replay", self._source.publish)
                self._begin(0)
                continue
            if answered or self._next == before:
                break
        if answered:
            self._misses = 0
            self.progress.answered = self._clock()
        else:
            self._misses = min(self._misses + 1, 16)
        return answered

    async def _catch_up(self, address: str) -> bool:
        """Ask for everything from the last applied batch on; True where the answer was whole."""
        first = max(self._next - 1, 0)
        verified = not self._next
        async with aclosing(self._replayed(address, first)) as replayed:
            async for number, payload in replayed:
                if not verified:
                    if number != first or hash(payload) != self._last:
                        raise _RestartedError
                    verified = True
                elif number is None:
                    self.progress.complete |= not self._next  # nothing was published yet
                    return True
                elif not self._next:
                    self._begin(number)
                    self._apply(number, payload)
                elif number == self._next:
                    self._apply(number, payload)
                elif number > self._next:
                    return False  # some were dropped on the way: ask again
        return False

    async def _replayed(self, address: str, first: int) -> AsyncGenerator[tuple[int | None, bytes], None]:
        """Yield the batches from `first` on, and None at their end; ends without it where the answer breaks off."""
        socket = self._context.socket(zmq.DEALER)
        try:
            _prepare(socket, _AT_ONCE * 16)
            socket.connect(address)
            await socket.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")])
            while await socket.poll(int(1000 * self._patience.reply)):
                frames = await socket.recv_multipart()
                number = sequence_of(frames[-2]) if len(frames) > 1 else None
                yield number, frames[-1]
                if number is None:
                    return
        finally:
            socket.close()

    def _begin(self, number: int) -> None:
        """Know nothing of what was before this batch."""
        self._feed.clear()
        self._next, self._last = number, 0
        self.progress.complete = False

    def _apply(self, number: int, payload: bytes) -> None:
        strange = self._feed.strange
        self.progress.complete |= number == 0
        self._feed.take(self._decoder.decode(payload))
        if self._feed.strange != strange:
            self.progress.garbage += self._feed.strange - strange
            self.progress.complete = False
        self._next, self._last = number + 1, hash(payload)
        self.progress.batches += 1


def _prepare(socket: zmq.asyncio.Socket, queued: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, queued)
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    # A peer that is gone without a word is noticed, and connected anew.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
