"""HTTP/1.1 as a stand-in reads and writes it, wrong framing included."""

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

_STALLED_S = 0.3  # a write that takes longer was stopped by a reader that doesn't read


@dataclass
class Seen:
    """One request as it arrived; times are the loop's. `left` is when the client closed before it had its answer."""

    method: str
    path: str
    headers: dict
    raw: bytes
    reused: bool = False  # the connection had served a request before
    arrived: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    left: float | None = None
    chunks: int = 0  # of a stream, sent so far

    @property
    def json(self):
        return json.loads(self.raw)


def reset(writer):
    """Close a connection with a RST, whatever was sent or not read."""
    if (sock := writer.get_extra_info("socket")) is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def read_request(reader, carry, *, reused):
    """Read one request, None where the connection ended instead."""
    try:
        head = carry + await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        raw = await _read_chunks(reader)
    else:
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, raw, reused)


async def _read_chunks(reader):
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


def head(status, headers):
    """Return a status line and headers."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode("latin-1")


def chunk(data):
    """Return a piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def send_whole(writer, status, body, headers, fault):
    """Send an answer framed as the fault says; false where the connection must end."""
    lines = {"content-type": "application/json", "server": "secret", **headers}
    off = 10 if fault.cut_body else fault.length_off
    payload = body
    if fault.until_close:
        lines["connection"] = "close"
    elif fault.chunked:
        lines["transfer-encoding"] = "chunked"
        payload = b"".join(chunk(body[at : at + 7]) for at in range(0, len(body), 7)) + b"0\r\n\r\n"
    else:
        lines["content-length"] = str(len(body) + off)
    start = fault.interim + head(status, lines)
    if fault.pause_in_body is not None:
        writer.write(start + payload[: fault.pause_in_body])
        await writer.drain()
        await fault.hold.wait()
        start, payload = b"", payload[fault.pause_in_body :]
    for piece in _pieces(start + payload + fault.trailing, single=fault.byte_by_byte):
        writer.write(piece)
        await writer.drain()
    return off <= 0 and not fault.until_close


async def send_events(writer, events, headers, fault, seen, stalled):
    """Send a stream of events as the fault says; false where the connection must end."""
    lines = {"content-type": "text/event-stream; charset=utf-8", "server": "secret", **headers}
    lines |= {"connection": "close"} if fault.until_close else {"transfer-encoding": "chunked"}
    writer.transport.set_write_buffer_limits(high=1 << 16)
    writer.write(fault.interim + head(200, lines))
    for index, event in enumerate(events):
        if index == fault.close_after:
            await writer.drain()
            (reset if fault.reset else lambda it: it.transport.abort())(writer)
            return False
        if index == fault.end_after:
            break
        await writer.drain()
        await fault.before_chunk(index)
        for piece in _pieces(event, single=fault.byte_by_byte):
            writer.write(piece if fault.until_close else chunk(piece))
            await _drain(writer, stalled)
        seen.chunks += 1
    if not fault.until_close:
        writer.write(b"0\r\n\r\n" + fault.trailing)
    await writer.drain()
    return not fault.until_close


def _pieces(data, *, single):
    return [data[at : at + 1] for at in range(len(data))] if single else [data]


async def _drain(writer, stalled):
    """Wait until the bytes are on their way; tell where the reader keeps them waiting."""
    telling = asyncio.get_running_loop().call_later(_STALLED_S, stalled.set)
    try:
        await writer.drain()
    finally:
        telling.cancel()


class BlackHole:
    """A port that nobody can connect to and that refuses nobody: its queue is full for as long as the block lasts."""

    def __init__(self, port=0):
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.fillers = []

    def __enter__(self):
        self.listener.listen(0)
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self.listener.getsockname())
            self.fillers.append(filler)
        self.own = self._trying()
        return self

    def __exit__(self, *_):
        for sock in (*self.fillers, self.listener):
            sock.close()

    def _trying(self):
        remote, syn_sent = f":{self.port:04X}", "02"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        return sum(fields[2].endswith(remote) and fields[3] == syn_sent for fields in lines)

    @property
    def trying(self):
        """How many others are trying to connect."""
        return self._trying() - self.own
