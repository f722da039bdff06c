"""KV blocks of one engine: pinned by requests, kept for their prefix when free, evicted oldest first. Pure.

As in vLLM: a block is found by the hash of everything up to its end, a request shares blocks that are there already,
and a request's blocks are freed from its end, so that the beginning of a prompt is evicted last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockChanges:
    """What was stored and removed since somebody looked: (parent or None, hashes in order), and hashes."""

    stored: list[tuple[int | None, tuple[int, ...]]] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)

    def take(self) -> BlockChanges:
        """Return what there was, and begin again."""
        taken = BlockChanges(self.stored, self.removed)
        self.stored, self.removed = [], []
        return taken


class PrefixCache:
    """Blocks by content hash. `capacity` is all memory in blocks, `kept` how many may hold prefixes; None: no limit.

    `changes`, if given, collects what is stored and removed.
    """

    def __init__(self, capacity: int | None, kept: int | None, changes: BlockChanges | None = None) -> None:
        self._capacity = capacity
        self._kept = kept
        self._changes = changes
        self._pinned: dict[int, int] = {}  # hash -> requests that hold it
        self._idle: OrderedDict[int, None] = OrderedDict()  # hashes that nobody holds, oldest first
        self.plain = 0  # blocks in use that have no hash: ends of prompts, generated tokens

    @property
    def used(self) -> int:
        """Return how many blocks are held by requests."""
        return len(self._pinned) + self.plain

    @property
    def free(self) -> int | None:
        """Return how many blocks could be had, evicting; None where there is no limit."""
        return None if self._capacity is None else self._capacity - self.used

    @property
    def cached(self) -> int:
        """Return how many blocks can be found by their hash."""
        return len(self._pinned) + len(self._idle)

    def hits(self, hashes: Sequence[int]) -> int:
        """Return how many of the first blocks are there; nothing changes."""
        count = 0
        for block in hashes:
            if block not in self._pinned and block not in self._idle:
                break
            count += 1
        return count

    def acquire(self, hashes: Sequence[int], plain: int) -> int | None:
        """Pin a prompt's blocks and `plain` more; return how many of its first were there, None where they don't fit.

        Blocks that were missing count as stored from now on: they are computed before anybody can read them.
        """
        if self._capacity is not None:
            new = sum(1 for block in hashes if block not in self._pinned)
            if self.used + new + plain > self._capacity:
                return None
        pinned, idle = self._pinned, self._idle
        hit, missing = 0, False
        fresh: list[int] = []
        for block in hashes:
            holders = pinned.get(block)
            if holders is not None:
                pinned[block] = holders + 1
            elif block in idle:
                del idle[block]
                pinned[block] = 1
            else:
                pinned[block] = 1
                fresh.append(block)
                missing = True
                continue
            if not missing:
                hit += 1
        self.plain += plain
        if fresh and self._changes is not None:
            self._tell_stored(hashes, fresh)
        self._evict()
        return hit

    def grow(self, blocks: int) -> bool:
        """Take more blocks for generated tokens; false, and nothing taken, where there are too few."""
        if self._capacity is not None and self.used + blocks > self._capacity:
            return False
        self.plain += blocks
        self._evict()
        return True

    def release(self, hashes: Sequence[int], plain: int) -> None:
        """Give a request's blocks back; those with a hash are kept until room is needed."""
        pinned, idle = self._pinned, self._idle
        for block in reversed(hashes):
            holders = pinned[block]
            if holders > 1:
                pinned[block] = holders - 1
            else:
                del pinned[block]
                idle[block] = None
        self.plain -= plain
        self._evict()

    def clear(self) -> None:
        """Forget every prefix that no request holds."""
        if self._changes is not None:
            self._changes.removed.extend(self._idle)
        self._idle.clear()

    def _evict(self) -> None:
        idle = self._idle
        cached, over = len(self._pinned) + len(idle), 0
        if self._capacity is not None:
            over = cached + self.plain - self._capacity
        if self._kept is not None and cached - self._kept > over:
            over = cached - self._kept
        for _ in range(min(over, len(idle))):
            block, _ = idle.popitem(last=False)
            if self._changes is not None:
                self._changes.removed.append(block)

    def _tell_stored(self, hashes: Sequence[int], fresh: list[int]) -> None:
        """Note runs of new blocks, each with the block before it."""
        new, run, parent = set(fresh), list[int](), None
        changes = self._changes
        if changes is None:
            return
        before: int | None = None
        for block in hashes:
            if block in new:
                if not run:
                    parent = before
                run.append(block)
            elif run:
                changes.stored.append((parent, tuple(run)))
                run = []
            before = block
        if run:
            changes.stored.append((parent, tuple(run)))
