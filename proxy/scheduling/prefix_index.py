"""Which endpoints have seen which beginnings of prompts: approximate, from what was sent there. Pure.

A prompt becomes a chain of keys, one a chunk, each of which stands for all of the prompt up to the end of its chunk.
The index keeps the endpoints of every key, and for every endpoint its keys by last use, the oldest of which go first.

Sizes are in characters of text, or four for a token id: see `prompt_text`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from proxy.scheduling.key_table import KeyTable

# (length of a chunk, where such chunks end): fine where prompts part most often, coarse where a chunk is still about
# an eighth of what stands before it. Five million characters are 160 keys.
_BANDS = ((512, 4096), (2048, 65_536), (8192, 524_288), (65_536, 1 << 62))
# Of a forgotten endpoint's keys this many are dropped with each new prompt, so that none waits for all of them.
_DROPPED_AT_ONCE = 128
# The fullest endpoint is looked for once for so many entries.
_TAKEN_AT_ONCE = 256


class Chain(NamedTuple):
    """The keys of one prompt, and its length."""

    keys: tuple[int, ...]
    size: int


def chain(text: str | bytes, salt: str = "") -> Chain:
    """Return the keys of a prompt; prompts share as many leading keys as they share whole chunks, and the salt.

    The hash is Python's own (SipHash with a secret of the process): two gigabytes a second, and nobody outside can make
    keys collide. So keys mean nothing to another process.
    """
    keys: list[int] = []
    length, start, key = len(text), 0, hash(salt)
    for size, end in _BANDS:
        for position in range(start, min(end, length - size + 1), size):
            key = hash((key, text[position : position + size]))
            keys.append(key)
        if length < end:
            break
        start = end
    return Chain(tuple(keys), length)


def covered(count: int) -> int:
    """Return the length of text that the first `count` keys of a chain stand for."""
    start = 0
    for size, end in _BANDS:
        if count <= (end - start) // size:
            return start + count * size
        count -= (end - start) // size
        start = end
    return start


def _sizes() -> Iterator[int]:
    start = 0
    for size, end in _BANDS:
        for _ in range(start, end, size):
            yield size
        start = end


class _Held:
    """What one endpoint is believed to hold, in order of last use."""

    __slots__ = ("bit", "chunks", "size")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.chunks: OrderedDict[int, int] = OrderedDict()  # key -> size
        self.size = 0


class PrefixIndex:
    """Endpoints, by small numbers that the caller gives, and the beginnings of prompts that they were sent.

    At most `entries` pairs of key and endpoint are kept (about 260 bytes each). A key leaves an endpoint no later than
    those that follow it in its chain: what an endpoint holds is always a set of whole beginnings.
    """

    def __init__(self, entries: int = 1_000_000) -> None:
        self._most = entries
        self._count = 0
        self._table: KeyTable[int] = KeyTable()
        self._held: dict[int, _Held] = {}
        self._limits: dict[int, int] = {}
        self._dropped: list[_Held] = []

    def __len__(self) -> int:
        """Return the pairs of key and endpoint that are kept."""
        return self._count

    def limit(self, endpoint: int, size: int) -> None:
        """Say how much an endpoint can hold at all, restarted or not: what its KV cache has room for."""
        self._limits[endpoint] = size

    def matched(self, prompt: Chain) -> Mapping[int, int]:
        """Return the matched length for each endpoint that holds at least the first chunk."""
        return self._table.leading(prompt.keys, covered)

    def record(self, endpoint: int, prompt: Chain) -> None:
        """Note that an endpoint was sent a prompt, and so will hold it."""
        if self._dropped:
            self._drop(_DROPPED_AT_ONCE)
        held = self._held.get(endpoint)
        if held is None:
            held = self._held[endpoint] = _Held(self._table.bit_of(endpoint))
        chunks, add, bit, before = held.chunks, self._table.add, held.bit, len(held.chunks)
        sizes = list(islice(_sizes(), len(prompt.keys)))
        # The last chunk first: so the first is the one used last, and the last to go.
        for key in reversed(prompt.keys):
            size = sizes.pop()
            if key in chunks:
                chunks.move_to_end(key)
            else:
                chunks[key] = size
                add(key, bit)
                held.size += size
        self._count += len(chunks) - before
        limit = self._limits.get(endpoint, held.size)
        while held.size > limit:
            self._forget_oldest(held)
        while self._count > self._most:
            self._make_room(held)

    def forget(self, endpoint: int) -> None:
        """Note that an endpoint holds nothing any more: it was restarted, or is gone."""
        held = self._held.pop(endpoint, None)
        if held is not None:
            self._table.retire(endpoint)
            self._dropped.append(held)

    def _forget_oldest(self, held: _Held) -> None:
        key, size = held.chunks.popitem(last=False)
        held.size -= size
        self._count -= 1
        self._table.drop(key, held.bit)

    def _make_room(self, held: _Held) -> None:
        """Take from dropped endpoints, else from this one if it has its share, else from the one with the most."""
        if self._dropped:
            self._drop(_DROPPED_AT_ONCE)
            return
        if len(held.chunks) * len(self._held) < self._most:
            held = max(self._held.values(), key=lambda other: len(other.chunks))
        for _ in range(min(len(held.chunks), max(self._count - self._most, _TAKEN_AT_ONCE))):
            self._forget_oldest(held)

    def _drop(self, count: int) -> None:
        held = self._dropped[-1]
        for _ in range(min(count, len(held.chunks))):
            self._forget_oldest(held)
        if not held.chunks:
            self._dropped.pop()
            self._table.release(held.bit)
