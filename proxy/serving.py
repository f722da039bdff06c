"""Sockets, TLS and uvicorn: what turns the application into a server, in one process of possibly several."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from proxy.admin import create_admin_app
from proxy.app import create_app
from proxy.client_protocol import protocol_class
from proxy.config import ProxyConfig
from proxy.shared_counts import SharedCounts

_BACKLOG = 4096
_REST_TICKS = 30  # of uvicorn's, which come ten a second
# glibc's numbers for mallopt (malloc.h), and what a proxy with large bodies does well with, in bytes.
_MALLOC_SETTINGS = {-1: 64 << 20, -2: 4 << 20, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How to serve: sockets that are bound already, files for TLS, seconds for streams to end at a stop."""

    listener: socket.socket
    admin: socket.socket | None = None
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    grace: float = 30.0
    log_level: str = "info"


def serve(
    config: ProxyConfig,
    settings: ServerSettings,
    counts: SharedCounts | None = None,
    kv_store: Path | None = None,
) -> None:
    """Serve until a signal ends it; table of counts and file of KV figures are those of all workers, None for one."""
    allow_many_files()
    set_up_logging(settings.log_level)
    # uvicorn raises the signal again once it has stopped in order; that is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = create_app(config, counts=counts, kv_store=kv_store)
    servers = [_Server(_settings_of(app, settings, config))]
    sockets = [settings.listener]
    if settings.admin is not None:
        admin_app = create_admin_app(app.state.services)
        servers.append(_Server(uvicorn.Config(admin_app, http="httptools", log_config=None, access_log=False)))
        sockets.append(settings.admin)
    keep_freed_memory()
    spare_collector()
    uvloop.run(_serve_all(servers, sockets))


async def _serve_all(servers: list[_Server], sockets: list[socket.socket]) -> None:
    public, *others = servers
    for server in others:
        server.leader = public
    await asyncio.gather(*(server.serve([listener]) for server, listener in zip(servers, sockets, strict=True)))


class _Server(uvicorn.Server):
    """Ends at once at the second signal, whichever it is. One with a leader leaves signals to it and ends with it.

    Between two bursts of work it gives the memory back that was kept for the next large body.
    """

    leader: _Server | None = None
    _answered = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.force_exit or self.should_exit
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self.leader is not None and self.leader.should_exit:
            self.should_exit = self.force_exit = True
        if counter % _REST_TICKS == 0 and not self.server_state.tasks:
            answered = self.server_state.total_requests
            if answered != self._answered:
                self._answered = answered
                return_freed_memory()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if self.leader is not None:
            yield
            return
        with super().capture_signals():
            yield


def _settings_of(app: object, settings: ServerSettings, config: ProxyConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=protocol_class(config.limits),
        log_level=settings.log_level,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=True,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
        ssl_ca_certs=settings.client_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.client_ca else ssl.CERT_NONE,
        timeout_graceful_shutdown=max(1, round(settings.grace)),
        backlog=_BACKLOG,
    )


def allow_many_files() -> None:
    """Use all the open files that this user may have: a streamed request takes up to three connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB of what is freed: else each large body is mapped and cleared page by page anew.

    With another C library nothing happens.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        for number, value in _MALLOC_SETTINGS.items():
            mallopt(number, value)


def return_freed_memory() -> None:
    """Have glibc return what it kept; some milliseconds, so for when nobody is being served."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def spare_collector() -> None:
    """Keep what lives as long as the process out of collections, and make these rarer: they stop every stream.

    A request that ends in order leaves nothing to collect; connections and failures do.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


def set_up_logging(level: str) -> None:
    """Log to the error stream."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
