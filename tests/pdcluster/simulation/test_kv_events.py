"""KV events on the wire: what a follower of them knows is what the engine holds, also after a replay."""

import asyncio
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from pdcluster.simulation.profile import EngineProfile

SMALL = replace(EngineProfile(), block_tokens=16, cache_blocks=64, decode_base_s=0.001)


def block(letter):
    return letter * 64


async def replayed(source, begin=0):
    """Return all batches from a number on; DEALER takes many answers to one question, as vLLM's clients do."""
    context = zmq.asyncio.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(source["replay_endpoint"])
    await asking.send_multipart((b"", begin.to_bytes(8, "big")))
    found = []
    async with asyncio.timeout(5):
        while True:
            _, topic, number, payload = await asking.recv_multipart()
            if number == (-1).to_bytes(8, "big", signed=True):
                break
            assert topic == b""
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
    asking.close(linger=0)
    context.term()
    return found


async def sources(client, name="prefill-0"):
    return (await client.get(name, "/kv_event_sources")).json()["0"]


async def test_stored_blocks_are_told_with_tokens_parents_and_keys(serving):
    async with serving(kv_events=True, profile=SMALL) as client:
        source = await sources(client)
        assert (source["publisher"], source["topic"]) == ("zmq", "")
        await client.prefill(block("a") + block("b") + "tail")
        await client.prefill(block("a") + block("b") + block("c"), cache_salt=None)
        await client.prefill(block("a") + block("b"), cache_salt="s")
        tokens = (await client.post("prefill-0", {"prompt": block("c")}, "/tokenize")).json()["tokens"]
        found = await replayed(source)
    assert [number for number, _ in found] == [0, 1, 2]
    (first, second, salted) = (batch[1] for _, batch in found)
    (stored,), (more,), (apart,) = first, second, salted
    assert stored["type"] == more["type"] == "BlockStored"
    assert stored["parent_block_hash"] is None
    assert len(stored["block_hashes"]) == 2
    assert len(stored["token_ids"]) == 32
    assert more["parent_block_hash"] == stored["block_hashes"][1]
    assert more["token_ids"] == tokens
    assert (more["block_size"], more["medium"], more["lora_id"], more["lora_name"]) == (16, "GPU", None, None)
    assert stored["extra_keys"] == [None, None]
    assert apart["extra_keys"] == [["s"], None]
    assert not set(apart["block_hashes"]) & set(stored["block_hashes"])
    assert found[0][1][0] == 1_700_000_000.0
    assert found[0][1][2] == 0


async def test_a_subscriber_hears_batches_in_order_and_a_replay_fills_what_it_missed(serving):
    async with serving(kv_events=True, profile=SMALL) as client:
        source = await sources(client)
        for letter in "abc":
            await client.prefill(block(letter))
        context = zmq.asyncio.Context()
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.connect(source["endpoint"])
        heard = None
        async with asyncio.timeout(5):
            index = 0
            while heard is None:  # a subscription takes a moment to arrive
                await client.prefill(f"{index:064d}")
                index += 1
                if await subscriber.poll(20):
                    heard = await subscriber.recv_multipart()
        topic, number, payload = heard
        number = int.from_bytes(number, "big")
        assert topic == b""
        assert number >= 3
        kept = dict(await replayed(source))
        assert list(kept) == list(range(index + 3))
        assert kept[number] == msgspec.msgpack.decode(payload)
        assert [number for number, _ in await replayed(source, begin=2)] == list(kept)[2:]
        subscriber.close(linger=0)
        context.term()


async def test_whoever_follows_the_events_knows_what_the_engine_holds(serving):
    async with serving(kv_events=True, profile=SMALL) as client:
        for index in range(60):
            text = "".join(f"{index % 7:064d}" if part == 0 else f"{index:060d}{part:04d}" for part in range(3))
            await client.prefill(text)
        held, parents = set(), {}
        for _, (_, events, _) in await replayed(await sources(client)):
            for event in events:
                if event["type"] == "BlockRemoved":
                    held -= set(event["block_hashes"])
                else:
                    parents[event["block_hashes"][0]] = event["parent_block_hash"]
                    held |= set(event["block_hashes"])
        engine = client.engines.engines["prefill-0"].engine
        assert len(held) == engine.cache.cached
        assert all(engine.cache.hits((item,)) for item in held)
        assert None in parents.values()


async def test_prompts_that_are_over_leave_nothing_behind_in_the_publisher(serving):
    async with serving(kv_events=True, profile=SMALL) as client:
        await asyncio.gather(
            *(
                client.post("decode-0", {"prompt": block(letter), "max_tokens": 3}, "/v1/completions")
                for letter in "abcab"
            )
        )
        assert client.engines.engines["decode-0"].publisher._known == {}
