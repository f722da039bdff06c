"""`python -m proxy` as its users run it, in front of two stand-ins."""

import asyncio
import os
import socket
import subprocess
import sys

import httpx

from tests.stand_in.engine import StandIn, Wire


class Running:
    """`python -m proxy` in front of two stand-ins."""

    def __init__(self, *flags, scheme="http", environment=None, make=StandIn, **client):
        self.make = make
        self.flags, self.scheme, self.client_settings = flags, scheme, client
        self.environment = {**os.environ, **(environment or {})}

    async def __aenter__(self):
        self.wire = Wire()
        self.prefill = await self.make("prefill", self.wire).start()
        self.decode = await self.make("decode", self.wire).start()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        arguments = ("--prefill", self.prefill.url, "--decode", self.decode.url, "--port", str(self.port))
        self.client = httpx.AsyncClient(
            base_url=f"{self.scheme}://127.0.0.1:{self.port}", timeout=10, **self.client_settings
        )
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "proxy",
                *arguments,
                "--health-interval",
                "0.1",
                "--shutdown-grace",
                "60",
                *self.flags,
            ],
            stderr=subprocess.DEVNULL,
            env=self.environment,
        )
        async with asyncio.timeout(30):
            while not await self.ready():
                await asyncio.sleep(0.05)
        return self

    async def ready(self):
        try:
            return (await self.client.get("/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    async def refuses_connections(self):
        async with asyncio.timeout(10):
            while await accepts(self.port):
                await asyncio.sleep(0.05)

    async def exit_code(self):
        return await asyncio.to_thread(self.process.wait, 10)

    async def __aexit__(self, *_):
        self.process.kill()
        self.process.wait()
        await self.client.aclose()
        await self.prefill.stop()
        await self.decode.stop()
        assert self.wire.violations == []


async def accepts(port):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
