"""KV events of a simulated engine over ZMQ, as vLLM 0.32 publishes them (`vllm/distributed/kv_events.py`).

A PUB socket sends (topic, number as 8 bytes, batch in msgpack); a ROUTER socket answers a number with all batches kept
from there on, then number -1. A batch is [time, events, data-parallel rank], an event a map whose `type` names it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pdcluster.simulation.prefix_cache import BlockChanges
from pdcluster.simulation.prompt_tokens import TOKEN_BYTES, token_ids

_KEPT_BATCHES = 10_000
_HIGH_WATER = 100_000
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(slots=True)
class _Known:
    """A block of prompts that are in the engine, and how many of them."""

    packed: bytes
    keys: tuple[str, ...]  # that are hashed with this block
    holders: int = 0


class KvEventPublisher:
    """Publishes what one engine's cache stores and removes. `changes` is filled by the engine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], block_tokens: int, wall: Callable[[], float]) -> None:
        self.changes = BlockChanges()
        self._block_tokens = block_tokens
        self._wall = wall
        self._known: dict[int, _Known] = {}
        self._over: list[tuple[int, ...]] = []
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT_BATCHES)
        self._number = 0
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(_HIGH_WATER)
        self._router = zmq.asyncio.Context.shadow(context.underlying).socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.bind("tcp://127.0.0.1:0")
        self._serving = asyncio.get_running_loop().create_task(self._serve_replays())

    def source(self) -> dict[str, Any]:
        """Return what GET /kv_event_sources tells of it."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._pub.getsockopt_string(zmq.LAST_ENDPOINT),
            "replay_endpoint": self._router.getsockopt_string(zmq.LAST_ENDPOINT),
            "buffer_steps": _KEPT_BATCHES,
            "hwm": _HIGH_WATER,
            "max_queue_size": _HIGH_WATER,
            "topic": "",
        }

    def note(self, hashes: tuple[int, ...], packed: bytes, salt: str | None) -> None:
        """Remember a prompt's blocks while the engine has the prompt, since events tell their tokens."""
        size = self._block_tokens * TOKEN_BYTES
        for index, block in enumerate(hashes):
            known = self._known.get(block)
            if known is None:
                keys = (salt,) if salt is not None and index == 0 else ()
                known = self._known[block] = _Known(packed[index * size : (index + 1) * size], keys)
            known.holders += 1

    def forget(self, hashes: tuple[int, ...]) -> None:
        """Hear that the engine is done with a prompt; what it stored is still published first."""
        self._over.append(hashes)

    def publish(self) -> None:
        """Send one batch of what has changed, if anything has."""
        if self.changes.stored or self.changes.removed:
            self._send(self.changes.take())
        for hashes in self._over:
            for block in hashes:
                known = self._known[block]
                known.holders -= 1
                if not known.holders:
                    del self._known[block]
        self._over.clear()

    def _send(self, taken: BlockChanges) -> None:
        # Room is made before it is used.
        events: list[dict[str, Any]] = []
        if taken.removed:
            events.append({"type": "BlockRemoved", "block_hashes": taken.removed, "medium": "GPU"})
        events.extend(self._stored(parent, hashes) for parent, hashes in taken.stored)
        payload = msgspec.msgpack.encode([self._wall(), events, 0])
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._batches.append((number, payload))
        self._pub.send_multipart((b"", number, payload))

    async def close(self) -> None:
        """Close both sockets."""
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._pub.close(linger=0)
        self._router.close(linger=0)

    def _stored(self, parent: int | None, hashes: tuple[int, ...]) -> dict[str, Any]:
        known = [self._known[block] for block in hashes]
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": token_ids(b"".join(block.packed for block in known)),
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [block.keys or None for block in known],
        }

    async def _serve_replays(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3:  # noqa: PLR2004 - who asks, nothing, a number
                continue
            client, _, begin = frames
            for number, payload in list(self._batches):
                if number >= begin:  # 8 bytes, big-endian: they compare as numbers do
                    await self._router.send_multipart((client, b"", b"", number, payload))
            await self._router.send_multipart((client, b"", b"", _END, b""))
