"""Which KV blocks engines hold: exact, from the events in which they say what they store and remove. Pure.

Engines name a block by a hash of their own, over the block's tokens and the hash of the block before it; which function
it is, and its seed, is their business. So the index names blocks itself, by the tokens that an event carries, and keeps
for each publisher which of its hashes is which of our keys.

Facts read in vLLM 0.32, `v1/core/block_pool.py` and `kv_cache_manager.py`: only full blocks are found again, and never
the block with the last token of a prompt, which must be computed for its logits; the same content may be stored twice,
by requests that ran at once, and is then removed twice; `extra_keys` has, for each block, the LoRA name, images as
(id, offset) and, for the first block, the cache salt.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from struct import iter_unpack
from typing import Any, NamedTuple

from proxy.scheduling.key_table import KeyTable

TOKEN_BYTES = 4
_LOW_BITS = (1 << 64) - 1
# The fullest publisher is looked for, its oldest blocks are listed, and what was cleared is dropped, so many at once.
_TAKEN_AT_ONCE = 1024


class Publisher(NamedTuple):
    """One source of events: an endpoint, by the number that the caller gives it, and a data-parallel rank there."""

    endpoint: int
    rank: int = 0


class Stored(NamedTuple):
    """Blocks that follow one another, the first of them after `parent` (None: it begins a prompt).

    `hashes` are the engine's, one a block; `ids` are packed token ids, `block_size` of them a block; `extra` has for
    each block what beside its tokens it stands for, None for nothing.
    """

    hashes: Sequence[int]
    parent: int | None
    ids: bytes
    block_size: int
    lora: str | None = None
    extra: Sequence[Sequence[Any] | None] | None = None


def pack(ids: Iterable[int]) -> bytes:
    """Return token ids as four bytes each; raises `TypeError` or `OverflowError` for what is no token id."""
    return array("I", ids).tobytes()


def short_hash(block_hash: bytes | int) -> int:
    """Return 64 bits of an engine's hash, which is enough to tell its blocks apart and a third of the memory."""
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash & _LOW_BITS


class _Held:
    """The blocks of one publisher, oldest first."""

    __slots__ = ("again", "bit", "block_size", "keys")

    def __init__(self, bit: int, block_size: int) -> None:
        self.bit = bit
        self.block_size = block_size
        self.keys: dict[int, int] = {}  # engine's hash -> our key
        self.again: Counter[int] = Counter()  # engine's hash -> further blocks with the same content


class BlockIndex:
    """At most `blocks` blocks of all publishers (about 250 bytes each); the oldest of the fullest publisher go first.

    `orphans` counts blocks that could not be placed since the block before them is not known, as happens where events
    were missed; `refused` those that make no sense.
    """

    def __init__(self, blocks: int = 1_000_000) -> None:
        self.orphans = 0
        self.refused = 0
        self._most = blocks
        self._count = 0
        self._table: KeyTable[Publisher] = KeyTable()
        self._held: dict[Publisher, _Held] = {}
        self._sizes: Counter[int] = Counter()  # block size -> publishers
        self._dropped: list[_Held] = []

    def __len__(self) -> int:
        """Return the blocks that are known."""
        return self._count

    def blocks(self, publisher: Publisher) -> int:
        """Return how many of them one publisher holds."""
        held = self._held.get(publisher)
        return 0 if held is None else len(held.keys)

    def cached(self, ids: bytes, lora: str | None = None, salt: str | None = None) -> Mapping[Publisher, int]:
        """Return how many leading tokens of a prompt each publisher would not compute again, where it is not 0.

        `ids` are packed token ids. It is what vLLM reports as cached tokens where there is no other tier of KV.
        """
        found: dict[Publisher, int] = {}
        for size in self._sizes:
            most = (len(ids) // TOKEN_BYTES - 1) // size
            keys = islice(_chain(_root(size, lora, salt), ids, size), max(0, most))
            found |= self._table.leading(keys, size.__mul__)
        return found

    def stored(self, publisher: Publisher, event: Stored) -> None:
        """Note that a publisher holds these blocks."""
        if self._dropped:
            self._drop()
        size, count = event.block_size, len(event.hashes)
        held = self._held.get(publisher)
        if size < 1 or len(event.ids) != count * size * TOKEN_BYTES or (held is not None and held.block_size != size):
            self.refused += count
            return
        if held is None:
            held = self._held[publisher] = _Held(self._table.bit_of(publisher), size)
            self._sizes[size] += 1
        if event.parent is None:
            salt = _salt(event)
            start: int | None = _root(size, event.lora, salt)
        else:
            salt, start = None, held.keys.get(event.parent)
        if start is None:
            self.orphans += count
            return
        known, before, bit, add = held.keys, len(held.keys), held.bit, self._table.add
        keys = list(_chain(start, event.ids, size, _others(event, salt)))  # what fails does so before anything changes
        for block_hash, key in zip(event.hashes, keys, strict=True):
            if block_hash in known:
                held.again[block_hash] += 1
            else:
                known[block_hash] = key
                add(key, bit)
        self._count += len(known) - before
        while self._count > self._most:
            self._make_room()

    def removed(self, publisher: Publisher, hashes: Iterable[int]) -> None:
        """Note that a publisher removed one block for each of these hashes."""
        held = self._held.get(publisher)
        if held is None:
            return
        for block_hash in hashes:
            if block_hash in held.again:
                held.again[block_hash] -= 1
                if not held.again[block_hash]:
                    del held.again[block_hash]
            elif block_hash in held.keys:
                self._remove(held, block_hash)

    def cleared(self, publisher: Publisher) -> None:
        """Note that a publisher holds nothing any more, or that what it holds is not known."""
        held = self._held.pop(publisher, None)
        if held is not None:
            self._table.retire(publisher)
            self._dropped.append(held)
            self._sizes[held.block_size] -= 1
            if not self._sizes[held.block_size]:
                del self._sizes[held.block_size]

    def forget(self, endpoint: int) -> None:
        """Note that all ranks of an endpoint hold nothing any more."""
        for publisher in [item for item in self._held if item.endpoint == endpoint]:
            self.cleared(publisher)

    def _remove(self, held: _Held, block_hash: int) -> None:
        self._table.drop(held.keys.pop(block_hash), held.bit)
        self._count -= 1

    def _make_room(self) -> None:
        if self._dropped:
            self._drop()
            return
        held = max(self._held.values(), key=lambda other: len(other.keys))
        for block_hash in list(islice(held.keys, max(_TAKEN_AT_ONCE, self._count - self._most))):
            held.again.pop(block_hash, None)
            self._remove(held, block_hash)

    def _drop(self) -> None:
        """Drop some of what was cleared; all at once would hold everybody up."""
        held = self._dropped[-1]
        for _ in range(min(_TAKEN_AT_ONCE, len(held.keys))):
            self._table.drop(held.keys.popitem()[1], held.bit)
            self._count -= 1
        if not held.keys:
            self._dropped.pop()
            self._table.release(held.bit)


def _root(size: int, lora: str | None, salt: str | None) -> int:
    return hash((size, lora, salt))


def _chain(start: int, ids: bytes, size: int, others: Iterator[tuple[Any, ...]] | None = None) -> Iterator[int]:
    """Yield one key for each full block; `others` are what the blocks stand for beside tokens, LoRA and salt."""
    key, step = start, size * TOKEN_BYTES
    blocks = iter_unpack(f"{step}s", memoryview(ids)[: len(ids) // step * step])
    if others is None:
        for block in blocks:
            key = hash((key, block))
            yield key
    else:
        for block, other in zip(blocks, others, strict=False):
            key = hash((key, block, other)) if other else hash((key, block))
            yield key


def _salt(event: Stored) -> str | None:
    """Return the cache salt, which only a prompt's first block has: the last string that is not the LoRA name."""
    first = event.extra[0] if event.extra else None
    words = [item for item in first or () if isinstance(item, str)]
    if words and words[0] == event.lora:
        words = words[1:]
    return words[-1] if words else None


def _others(event: Stored, salt: str | None) -> Iterator[tuple[Any, ...]] | None:
    """Return what each block holds of images or embeddings; None where no block does."""
    if not event.extra:
        return None
    plain = {event.lora, salt, None}
    found = [
        tuple(tuple(item) if isinstance(item, list) else item for item in extra or () if _is_other(item, plain))
        for extra in event.extra
    ]
    return iter(found) if any(found) else None


def _is_other(item: Any, plain: set[str | None]) -> bool:
    return not (isinstance(item, str) and item in plain)
