"""The little HTTP that both ends of the benchmark need: find whole requests and answers in what a socket brings."""

from __future__ import annotations

_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


def content_length(head: bytes) -> int | None:
    """Return what `content-length` says in a head, None where it isn't there."""
    low = head.lower()
    start = low.find(b"\r\ncontent-length:")
    if start < 0:
        return None
    stop = low.find(b"\r\n", start + 2)
    return int(low[start + 17 : stop if stop >= 0 else None])


def is_chunked(head: bytes) -> bool:
    """Tell whether the body comes in chunks."""
    return b"\r\ntransfer-encoding: chunked" in head.lower()


class Incoming:
    """What a socket brought: pieces, joined only once a whole message can be there."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._needed = 0

    def add(self, data: bytes) -> None:
        """Take a piece."""
        self._pieces.append(data)
        self._size += len(data)

    def take(self) -> tuple[bytes, bytes] | None:
        """Return head and body of the next whole message, None while there is none."""
        if self._size < self._needed or not self._size:
            return None
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        found = split_message(data)
        if found is None:
            stop = data.find(_END)
            length = content_length(data[:stop]) if stop >= 0 else None
            self._needed = stop + 4 + length if length is not None else 0
            self._pieces = [data]
            return None
        head, body, rest = found
        self._pieces, self._size, self._needed = [rest] if rest else [], len(rest), 0
        return head, body


def split_message(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return head, body and what follows of a whole message, None while it is incomplete."""
    stop = data.find(_END)
    if stop < 0:
        return None
    head, rest = data[:stop], data[stop + 4 :]
    length = content_length(head)
    if length is None and is_chunked(head):
        return _split_chunked(head, rest)
    length = length or 0
    return (head, rest[:length], rest[length:]) if len(rest) >= length else None


def _split_chunked(head: bytes, rest: bytes) -> tuple[bytes, bytes, bytes] | None:
    body: list[bytes] = []
    position = 0
    while True:
        line = rest.find(b"\r\n", position)
        if line < 0:
            return None
        size = int(rest[position:line].partition(b";")[0], 16)
        start = line + 2
        if len(rest) < start + size + 2:
            return None
        if size == 0:
            return head, b"".join(body), rest[start + 2 :]
        body.append(rest[start : start + size])
        position = start + size + 2


def ends_stream(tail: bytes) -> bool:
    """Tell whether a chunked answer ends with these bytes."""
    return tail.endswith(_LAST_CHUNK)
