"""The proxy as it runs, over real sockets, in front of stand-in engines."""

import asyncio
import random
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio
import uvicorn

from proxy.app import create_app
from proxy.client_protocol import protocol_class
from proxy.config import EndpointConfig, ProxyConfig, Timeouts
from tests.stand_in.engine import StandIn, Wire


@dataclass
class Rig:
    """A proxy with its engines and a client."""

    wire: Wire
    prefills: list
    decodes: list
    client: httpx.AsyncClient
    port: int

    async def metric(self, name, **labels):
        """Sum a metric over the label sets that match."""
        total = 0.0
        for line in (await self.client.get("/metrics")).text.splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    @asynccontextmanager
    async def counts(self, name, by, **labels):
        """Check that a metric grows by so much, within a moment, in a block."""
        before = await self.metric(name, **labels)
        yield

        async def grown():
            return await self.metric(name, **labels) - before >= by

        await self.until(grown)
        assert await self.metric(name, **labels) - before == by

    async def raw(self, sent, *, until=None, limit=5.0):
        """Send bytes on a connection of their own; return what comes until the proxy closes, or until those bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(limit):
                writer.write(sent)
                return await (reader.read() if until is None else reader.readuntil(until))
        finally:
            writer.close()

    async def until(self, condition, limit=5.0):
        """Wait for a condition of the proxy, which has a loop of its own; bounded."""
        async with asyncio.timeout(limit):
            while not await condition():
                await asyncio.sleep(0.01)

    async def ready(self):
        await self.until(self._is_ready)

    async def sound(self):
        """Engines are as new and ready, and no failure is held against one: a request has succeeded on both legs."""
        for engine in self.prefills + self.decodes:
            engine.forget()
        await self.ready()
        before = await self.metric("pdcluster_requests_total")
        reply = await self.client.post("/v1/completions", json={"prompt": "sound"})
        assert reply.headers["x-pdcluster-path"] == "disaggregated"

        async def counted():
            return await self.metric("pdcluster_requests_total") > before

        await self.until(counted)
        for engine in self.prefills + self.decodes:
            engine.forget()

    async def _is_ready(self):
        reply = (await self.client.get("/ready")).json()
        return reply["ready"] and not [line for line in reply["missing"] if "unknown" in line]

    async def idle(self):
        """Nothing is in flight any more."""

        async def none():
            return await self.metric("pdcluster_in_flight") == 0

        await self.until(none)


class ProxyThread:
    """uvicorn in a thread, as `pdcluster proxy` runs it."""

    def __init__(self, config, http=None):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        settings = uvicorn.Config(
            create_app(config, random.Random(1)),
            http=http or protocol_class(config.limits),
            loop="uvloop",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def stop(self):
        """Ask it to end; `ended` waits."""
        self.server.should_exit = True

    def ended(self):
        self.thread.join(timeout=15)
        self.socket.close()
        return not self.thread.is_alive()


@pytest.fixture(scope="session")
def stopping():
    """Proxies that end while the next tests run: uvicorn looks at its flag every 0.1 s only."""
    proxies = []
    yield proxies
    assert all(proxy.ended() for proxy in proxies)


@pytest.fixture
async def make_rig(stopping):
    """Build a rig of so many engines; everything is stopped at the end, and the protocol was kept."""
    async with _rigs(stopping) as make:
        yield make


@pytest.fixture
async def rig(make_rig):
    """One prefill, one decode."""
    return await make_rig()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_rig(stopping):
    """One prefill, one decode for a whole module, whose tests run on the module's loop; see `shared`."""
    async with _rigs(stopping) as make:
        yield await make(prefills=1, decodes=1)


@pytest_asyncio.fixture(loop_scope="module")
async def shared(lasting_rig):
    """The module's rig with engines as new; metrics go on counting. The protocol was kept, and nothing is in flight."""
    for engine in lasting_rig.prefills + lasting_rig.decodes:
        engine.forget()
    await lasting_rig.ready()
    yield lasting_rig
    await lasting_rig.idle()
    await lasting_rig.client.get("/health")  # what was counted after the last answer is counted now
    assert lasting_rig.wire.violations == []


@asynccontextmanager
async def _rigs(stopping):
    rigs = []

    async def make(prefills=1, decodes=1, *, wait=True, http=None, **config):
        wire = Wire()
        ps = [await StandIn("prefill", wire).start() for _ in range(prefills)]
        ds = [await StandIn("decode", wire).start() for _ in range(decodes)]
        endpoints = [EndpointConfig(f"p{i}", engine.url, "prefill") for i, engine in enumerate(ps)]
        endpoints += [EndpointConfig(f"d{i}", engine.url, "decode") for i, engine in enumerate(ds)]
        values = {"health_interval": 0.05, "timeouts": Timeouts(connect=1, prefill=5, headers=5, idle=5)} | config
        proxy = ProxyThread(ProxyConfig(endpoints=tuple(endpoints), **values), http)
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}", timeout=10, verify=False)  # loads no CAs
        rig = Rig(wire, ps, ds, client, proxy.port)
        rigs.append((rig, proxy))
        if wait:
            await rig.ready()
        return rig

    try:
        yield make
    finally:
        for rig, proxy in rigs:
            await rig.client.aclose()
            proxy.stop()
            stopping.append(proxy)
            if len(stopping) > 8:
                assert await asyncio.to_thread(stopping.pop(0).ended)
            for engine in rig.prefills + rig.decodes:
                await engine.stop()
    for rig, _ in rigs:
        assert rig.wire.violations == []
