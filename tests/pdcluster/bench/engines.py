"""A program of engines for tests: no time passes in them, and they tell what they served as simulated ones do.

usage: engines.py PREFILL_PORTS DECODE_PORTS [--slow PORT:FACTOR]
"""

import asyncio
import sys

import uvloop

from pdcluster.bench.stand_ins import StandIn, Tally


class Telling(StandIn):
    """A stand-in that counts its requests under its port."""

    def __init__(self, role, tally, port, counts):
        super().__init__(role, tally)
        self.count = counts[f"per_{role}"]
        self.port, self.counts = str(port), counts

    def _answer(self, path, body):
        if path == b"/stats":
            self._send(self.counts)
            return
        if body:
            self.count[self.port] = self.count.get(self.port, 0) + 1
        super()._answer(path, body)


async def serve(prefill, decode):
    loop, tally = asyncio.get_running_loop(), Tally()
    counts = {"per_prefill": {}, "per_decode": {}, "cached_share": 0.25}
    for role, ports in (("prefill", prefill), ("decode", decode)):
        for port in ports:
            await loop.create_server(
                lambda role=role, port=port: Telling(role, tally, port, counts), "127.0.0.1", port, backlog=1024
            )
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(*([int(port) for port in part.split(",")] for part in sys.argv[1:3])))
