"""A publisher of KV events as vLLM's: PUB and ROUTER sockets, numbered batches, a buffer for replays; and its faults."""

import asyncio
import contextlib
import itertools

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


def stored(hashes, ids, parent=None, size=4, **more):
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event | more


def removed(hashes, **more):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0} | more


def cleared():
    return {"type": "AllBlocksCleared"}


def batch(*events, rank=0):
    return msgspec.msgpack.encode([next(_times), list(events), rank])


_times = itertools.count(1_700_000_000.0)


class StandInPublisher:
    """`lost` batches are not published but can be replayed; the buffer holds `keep` batches."""

    def __init__(self, keep=10_000, topic=b""):
        self.keep, self.topic = keep, topic
        self.context = zmq.asyncio.Context()
        self.buffer, self.number = [], 0
        self.asked = []  # first numbers of the replays that were asked for
        self.answers = True
        self.at_most = None  # batches of a replay, as where the rest is dropped
        self.pub_port = self.replay_port = None

    async def start(self):
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.setsockopt(zmq.LINGER, 0)
        self.pub_port = await self._bind(self.pub, self.pub_port)
        self.replay_port = await self._bind(self.router, self.replay_port)
        self.serving = asyncio.create_task(self._serve())
        return self

    @property
    def addresses(self):
        return f"tcp://127.0.0.1:{self.pub_port}", f"tcp://127.0.0.1:{self.replay_port}"

    async def stop(self):
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        self.pub.close()
        self.router.close()

    async def close(self):
        await self.stop()
        self.context.destroy(linger=0)

    async def restart(self, *batches):
        """Be a new engine on the same ports, which has published some batches already."""
        await self.stop()
        self.buffer, self.number = [], 0
        for payload in batches:
            self.keep_batch(payload)
        await self.start()

    def keep_batch(self, payload):
        self.buffer = [*self.buffer, (self.number, payload)][-self.keep :]
        self.number += 1

    async def publish(self, *events, lost=False, payload=None):
        payload = batch(*events) if payload is None else payload
        if not lost:
            await self.pub.send_multipart([self.topic, self.number.to_bytes(8, "big"), payload])
        self.keep_batch(payload)

    async def send_raw(self, *frames):
        await self.pub.send_multipart(list(frames))

    async def _bind(self, socket, port):
        if port is None:
            return socket.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(500):  # a closed socket gives its port back when ZMQ's own thread has come to it
            with contextlib.suppress(zmq.ZMQError):
                socket.bind(f"tcp://127.0.0.1:{port}")
                return port
            await asyncio.sleep(0.01)
        raise TimeoutError(f"port {port} stays taken")

    async def _serve(self):
        while True:
            client, empty, first = await self.router.recv_multipart()
            assert empty == b""
            first = int.from_bytes(first, "big")
            self.asked.append(first)
            if not self.answers:
                continue
            rest = [(number, payload) for number, payload in self.buffer if number >= first]
            for number, payload in rest[: self.at_most]:
                await self.router.send_multipart([client, b"", self.topic, number.to_bytes(8, "big"), payload])
            if self.at_most is not None and len(rest) > self.at_most:
                number, payload = rest[-1]  # what comes after the hole
                await self.router.send_multipart([client, b"", self.topic, number.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", b"", END, b""])
