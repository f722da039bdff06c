"""Closed-loop load on one address, every answer checked; its own process, so that it shares nobody's event loop.

usage: python -m pdcluster.bench.load JSON     (the fields of `Load`; prints the fields of `Seen` as JSON)
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from dataclasses import dataclass, field

import orjson
import uvloop

from pdcluster.bench.http import ends_stream, split_message

_LIMIT_S = 120.0
_WARM_UP = 64
_EVENT = b"data: {"
_WORDS = "lorem ipsum dolor "


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests, so many at once. `pace` is milliseconds between a stream's events, `prompt` is bytes."""

    port: int
    concurrency: int
    requests: int
    tokens: int
    stream: bool = True
    pace: int = 0
    prompt: int = 2000
    pause: float = 0.0  # seconds between one client's requests
    warm_up: int = _WARM_UP
    key: str = ""


@dataclass(slots=True)
class Seen:
    """What came: seconds to the first byte of each answer, between a stream's pieces, events, and what was wrong."""

    seconds: float = 0.0
    requests: int = 0
    events: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """One client's connection; `ask` gives a future of the whole answer."""

    def __init__(self, load: Load, seen: Seen) -> None:
        self._load = load
        self._seen = seen
        self._answer: asyncio.Future[str] | None = None
        self._data = b""
        self._events = 0
        self._began = self._last = 0.0
        self._transport: asyncio.Transport | None = None

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._end("the connection closed")

    def ask(self, request: bytes) -> asyncio.Future[str]:
        """Send a request; the future's result is what was wrong with the answer, "" for nothing."""
        if self._transport is None:
            raise RuntimeError("not connected")
        self._answer = asyncio.get_running_loop().create_future()
        self._data, self._events = b"", 0
        self._began = self._last = time.perf_counter()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._began == self._last:
            self._seen.first.append(now - self._began)
            if not data.startswith(b"HTTP/1.1 200"):
                self._end("an error")
        elif self._load.stream:
            self._seen.gaps.append(now - self._last)
        self._last = now
        if self._load.stream:
            # A mark may lie across two reads: its first bytes are counted with the piece that ends it.
            self._events += (self._data[1 - len(_EVENT) :] + data).count(_EVENT)
            self._data = (self._data + data)[-64:]
            if ends_stream(self._data):
                self._end(self._wrong_stream())
            return
        self._data += data
        message = split_message(self._data)
        if message is not None:
            _, body, rest = message
            whole = body.count(b" tok") == self._load.tokens and not rest
            self._end("" if whole else "not the answer that was asked for")

    def _wrong_stream(self) -> str:
        if b"data: [DONE]" not in self._data:
            return "a stream without its end"
        return "" if self._events == self._load.tokens else "a stream with events missing"

    def _end(self, wrong: str) -> None:
        self._seen.events += self._events
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(wrong)


def request_bytes(load: Load, number: int) -> bytes:
    """Return one request to the byte; each has a prompt of its own."""
    body = orjson.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": f"{number} " + _WORDS * (load.prompt // len(_WORDS))}],
            "max_tokens": load.tokens,
            "temperature": 0,
            "stream": load.stream,
            "seed": load.pace,
        }
    )
    key = f"authorization: Bearer {load.key}\r\n" if load.key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{load.port}\r\ncontent-type: application/json\r\n"
        f"{key}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def put(load: Load, count: int) -> Seen:
    """Put `count` requests of this load on the address."""
    seen, numbers = Seen(requests=count), iter(range(count))

    async def client() -> None:
        connection: _Connection | None = None
        for number in numbers:
            request = request_bytes(load, number)
            if load.pause:
                await asyncio.sleep(load.pause)
            try:
                if connection is None or not connection.open:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(
                        lambda: _Connection(load, seen), "127.0.0.1", load.port
                    )
                wrong = await asyncio.wait_for(connection.ask(request), _LIMIT_S)
            except (OSError, TimeoutError) as error:
                wrong, connection = type(error).__name__, None
            if wrong:
                seen.wrong[wrong] = seen.wrong.get(wrong, 0) + 1
        if connection is not None:
            connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(load.concurrency, count))))
    seen.seconds = time.perf_counter() - began
    return seen


async def main(load: Load) -> None:
    """Warm up, say so, wait for a line, put the load on, print what came."""
    if load.warm_up:
        await put(load, load.warm_up)
    print("warm", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    seen = await put(load, load.requests)
    print(orjson.dumps(dataclasses.asdict(seen)).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main(Load(**orjson.loads(sys.argv[1]))))
