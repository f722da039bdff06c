"""One publisher's events -> the block index."""

from __future__ import annotations

from proxy.kv_events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from proxy.scheduling.block_index import BlockIndex, Publisher, Stored, pack, short_hash

# Groups of layers in which a hit is the longest unbroken beginning. In a model with other groups too (sliding windows,
# state spaces) these say what can be hit at most.
_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
# vLLM's word for the memory that its kernels read, on CPU builds too; other tiers have to be loaded first.
_DEVICE = (None, "GPU")


class Feed:
    """Puts events into the index; of a model with several groups of layers, those of the first that tells all.

    `strange` counts events that could not be used, which leaves the index less than exact.
    """

    def __init__(self, index: BlockIndex, publisher: Publisher) -> None:
        self.strange = 0
        self._index = index
        self._publisher = publisher
        self._group: int | None = None

    def take(self, batch: Batch) -> None:
        """Apply a batch; never raises."""
        self.strange += batch.strange
        for event in batch.events:
            try:
                self._apply(event)
            except (TypeError, ValueError, OverflowError):  # a token id that is none, an extra key that cannot be one
                self.strange += 1

    def clear(self) -> None:
        """Forget everything: the publisher was restarted, or too much was missed."""
        self._group = None
        self._index.cleared(self._publisher)

    def _apply(self, event: Event) -> None:
        match event:
            case BlockStored():
                if event.medium in _DEVICE and event.kv_cache_spec_kind in _WHOLE_PREFIX and event.block_hashes:
                    self._store(event)
            case BlockRemoved():
                if event.medium in _DEVICE and event.group_idx in (None, self._group):
                    self._index.removed(self._publisher, map(short_hash, event.block_hashes))
            case AllBlocksCleared():
                self._index.cleared(self._publisher)

    def _store(self, event: BlockStored) -> None:
        if self._group is None:
            self._group = event.group_idx
        elif event.group_idx != self._group:
            return
        parent = event.parent_block_hash
        stored = Stored(
            hashes=[short_hash(block_hash) for block_hash in event.block_hashes],
            parent=None if parent is None else short_hash(parent),
            ids=pack(event.token_ids),
            block_size=event.block_size,
            lora=event.lora_name,
            extra=event.extra_keys,
        )
        self._index.stored(self._publisher, stored)
