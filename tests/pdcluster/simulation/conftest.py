"""Engines on the wire, and a client that asks them."""

import asyncio
import selectors
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from pdcluster.simulation.server import Serving, served
from pdcluster.simulation.wire_engine import Clocks


class JumpingSelector(selectors.DefaultSelector):
    """Waits for no timer: where nothing is to be read, `skip` hears how long the loop would have slept."""

    def __init__(self):
        super().__init__()
        self.skip = None

    def select(self, timeout=None):
        found = super().select(0)
        if found or timeout is None or timeout <= 0:
            return found or super().select(timeout)
        time.sleep(0.00005)  # what was written to a socket of this machine is there at once, or very nearly
        found = super().select(0)
        if not found:
            self.skip(timeout)
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose time stands still while anything runs, and jumps to the next timer when nothing does.

    Both ends of every connection must be in it: then times are exact, however busy the machine.
    """

    def __init__(self):
        selector = JumpingSelector()
        super().__init__(selector)
        self._now = 1000.0
        selector.skip = self._jump

    def time(self):
        return self._now

    def _jump(self, seconds):
        self._now += seconds


@pytest.fixture
def in_no_time():
    """Run a coroutine in a loop that doesn't wait for timers."""

    def run(coroutine):
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            return runner.run(coroutine)

    return run


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
        clocks = Clocks(asyncio.get_running_loop().time, lambda: 1_700_000_000.0)
        async with (
            served(Serving(prefill, decode, **more), clocks) as engines,
            httpx.AsyncClient(timeout=20) as http,
        ):
            yield Client(http, engines)

    return serve
