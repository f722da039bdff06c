"""A connection that is over is freed at once: collections are rare on purpose, and memory would grow between them."""

import asyncio
import gc
import json

import pytest

from proxy.client_protocol import ClientProtocol
from proxy.engine_connection import EngineConnection


def alive(kind):
    return sum(kind in type(item).__mro__ for item in gc.get_objects())  # isinstance asks proxies of others


@pytest.fixture
def no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/nowhere"])
async def test_a_client_that_closes_its_connection_leaves_nothing_to_collect(rig, no_collections, path, fields):
    body = json.dumps({"prompt": "hi", **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    await rig.raw(head + body)

    async def only_ours():
        return alive(ClientProtocol) <= 1  # that of the rig's own client

    await rig.idle()
    await rig.until(only_ours)


async def test_a_client_that_leaves_its_stream_leaves_nothing_to_collect(rig, no_collections):
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    await rig.raw(head + body, until=b"data: ")

    async def only_ours():
        return alive(ClientProtocol) <= 1

    await rig.idle()
    await rig.until(only_ours)


async def test_an_engine_that_closes_its_connections_leaves_nothing_to_collect(rig, no_collections):
    before = alive(EngineConnection)
    for _ in range(5):
        await asyncio.gather(*(rig.client.post("/v1/completions", json={"prompt": "hi"}) for _ in range(8)))
        for engine in rig.prefills + rig.decodes:
            for writer in list(engine.connections):
                writer.close()

    async def no_more():
        return alive(EngineConnection) <= before + 8  # of eighty; probes go on meanwhile

    await rig.until(no_more)
