"""Many simulated engines in one process, each on a port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pdcluster.errors import UserError
from pdcluster.simulation.connection import Connection
from pdcluster.simulation.profile import EngineProfile
from pdcluster.simulation.routes import Routes
from pdcluster.simulation.wire_engine import Clocks, WireEngine

if TYPE_CHECKING:
    from pdcluster.simulation.kv_events import KvEventPublisher

_HOST = "127.0.0.1"
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Served:
    """Engines that listen: URLs by name ("prefill-0"), and what they did so far."""

    urls: Mapping[str, str]
    engines: Mapping[str, WireEngine]

    def of(self, role: str) -> list[str]:
        """Return the URLs of a role."""
        return [url for name, url in self.urls.items() if name.startswith(f"{role}-")]

    def stats(self) -> dict[str, Any]:
        """Return what each engine did, and how much of the prompts that were computed was cached."""
        computed = [engine for engine in self.engines.values() if engine.counted.prefills or engine.counted.alone]
        tokens = sum(engine.engine.counts.prompt_tokens for engine in computed)
        cached = sum(engine.engine.counts.cached_tokens for engine in computed)
        return {
            "cached_share": cached / tokens if tokens else None,
            "engines": {
                name: {
                    **asdict(engine.counted),
                    **asdict(engine.engine.counts),
                    "running": engine.engine.running,
                    "waiting": engine.engine.waiting,
                    "kept": engine.engine.kept,
                }
                for name, engine in self.engines.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served. Ports count up from `port_base`, prefill first; 0 lets the system choose them."""

    prefill: int
    decode: int
    profile: EngineProfile = field(default_factory=EngineProfile)
    slow: Mapping[tuple[str, int], float] | None = None
    port_base: int = 0
    kv_events: bool = False


@asynccontextmanager
async def served(what: Serving, clocks: Clocks) -> AsyncIterator[Served]:
    """Listen while the context lasts. Raises `UserError` where a port is taken."""
    make_publisher, close_publishers = _publishers(what, clocks.wall)
    engines: dict[str, WireEngine] = {}
    urls: dict[str, str] = {}
    told = Served(urls, engines)
    connections: set[Connection] = set()
    servers: list[asyncio.Server] = []
    try:
        for role, count in (("prefill", what.prefill), ("decode", what.decode)):
            for index in range(count):
                name = f"{role}-{index}"
                factor = (what.slow or {}).get((role, index), 1.0)
                profile = what.profile if factor == 1.0 else what.profile.slowed(factor)
                engines[name] = WireEngine(name, profile, clocks, make_publisher())
                port = what.port_base + len(servers) if what.port_base else 0
                server = await _listen(name, port, told, connections)
                servers.append(server)
                urls[name] = f"http://{_HOST}:{server.sockets[0].getsockname()[1]}"
        yield told
    finally:
        for server in servers:
            server.close()
        for connection in list(connections):
            connection.abort()
        for engine in engines.values():
            engine.stop()
        await close_publishers()


async def served_until_signal(what: Serving, clocks: Clocks, tell: Callable[[Served], None]) -> None:
    """Serve until SIGINT or SIGTERM; `tell` hears when all listen."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with served(what, clocks) as engines:
        tell(engines)
        await stop.wait()


async def _listen(name: str, port: int, told: Served, connections: set[Connection]) -> asyncio.Server:
    routes = Routes(told.engines[name], told.engines, told.stats)
    try:
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(routes.handle, connections), _HOST, port, backlog=_BACKLOG
        )
    except OSError as error:
        raise UserError(
            f"{name}: cannot listen on {_HOST}:{port}: {error.strerror}; give another --port-base"
        ) from None


def _publishers(
    what: Serving, wall: Callable[[], float]
) -> tuple[Callable[[], KvEventPublisher | None], Callable[[], Any]]:
    """Return what makes a publisher of KV events, and what closes all that were made; only these need pyzmq."""
    made: list[KvEventPublisher] = []
    if not what.kv_events:

        async def nothing() -> None:
            pass

        return lambda: None, nothing
    import zmq  # noqa: PLC0415

    from pdcluster.simulation.kv_events import KvEventPublisher  # noqa: PLC0415

    context = zmq.Context[zmq.Socket[bytes]]()

    def make() -> KvEventPublisher:
        made.append(KvEventPublisher(context, what.profile.block_tokens, wall))
        return made[-1]

    async def close() -> None:
        for publisher in made:
            await publisher.close()
        context.term()

    return make, close
