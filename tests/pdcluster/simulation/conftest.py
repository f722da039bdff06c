"""Engines on the wire, and a client that asks them."""

import time
from contextlib import asynccontextmanager

import httpx
import pytest

from pdcluster.simulation.server import Serving, served
from pdcluster.simulation.wire_engine import Clocks


class Client:
    """Asks engines as a router does. `engines` is what `served` gives."""

    def __init__(self, http, engines):
        self.http, self.engines = http, engines

    async def post(self, name, body, path="/v1/chat/completions", **headers):
        return await self.http.post(self.engines.urls[name] + path, json=body, headers=headers)

    async def get(self, name, path):
        return await self.http.get(self.engines.urls[name] + path)

    async def prefill(self, text, name="prefill-0", **more):
        """Return the reply of a prefill leg."""
        body = {**chat(text, 1), "stream": False, "kv_transfer_params": {"do_remote_decode": True}, **more}
        reply = await self.post(name, body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def metric(self, name, metric):
        """Return the value of a metric, its labels left out."""
        reply = await self.get(name, "/metrics")
        for line in reply.text.splitlines():
            if line.startswith(f"vllm:{metric}{{"):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no {metric} in\n{reply.text}")


def chat(text, max_tokens, **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}


@pytest.fixture
def serving():
    """Serve engines while a context lasts; gives a `Client`."""

    @asynccontextmanager
    async def serve(prefill=1, decode=1, **more):
        clocks = Clocks(time.monotonic, lambda: 1_700_000_000.0)
        async with (
            served(Serving(prefill, decode, **more), clocks) as engines,
            httpx.AsyncClient(timeout=20) as http,
        ):
            yield Client(http, engines)

    return serve
