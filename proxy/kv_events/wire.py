"""What an engine publishes, as msgpack. Source: vLLM 0.32, `distributed/kv_events.py`.

A message is (topic, sequence number as 8 bytes, batch); a batch is [time, events, data-parallel rank]; an event is a
map with its name under "type". Fields that are not used here, and those that later versions add, are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

SEQUENCE_BYTES = 8
# Ends a replay: -1 where a sequence number stands.
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that became full, one after another."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that were evicted."""

    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The whole cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(NamedTuple):
    """The events of one engine step; `strange` counts those that could not be read."""

    events: Sequence[Event]
    strange: int


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class BatchDecoder:
    """Reads batches. One event that cannot be read does not lose the others of its batch."""

    def __init__(self) -> None:
        self._batch = msgspec.msgpack.Decoder(_Batch)
        self._event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

    def decode(self, payload: bytes) -> Batch:
        """Return the events that could be read; never raises."""
        try:
            raw_events = self._batch.decode(payload).events
        except (msgspec.MsgspecError, RecursionError):
            return Batch((), 1)
        events: list[Event] = []
        for raw in raw_events:
            try:
                events.append(self._event.decode(raw))
            except (msgspec.MsgspecError, RecursionError):
                continue
        return Batch(events, len(raw_events) - len(events))


def sequence_of(frame: bytes) -> int | None:
    """Return a message's sequence number; None for the end of a replay and for what is none."""
    if len(frame) != SEQUENCE_BYTES or frame == END_OF_REPLAY:
        return None
    return int.from_bytes(frame, "big")
