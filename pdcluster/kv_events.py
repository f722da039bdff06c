"""How engines publish KV events: `--kv-events-config`, and where the proxy finds them. Pure.

Source: vLLM 0.32, `distributed/kv_events.py`. It listens only where an address is a wildcard or a local socket; to any
other it connects, and waits there for a subscriber to listen. With data parallelism rank r adds r to the port, in the
text of the address, whose scheme is looked for anywhere in it.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from pdcluster.spec import PoolSpec

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


class Addresses(NamedTuple):
    """A publisher's addresses, as the engine is told and as a subscriber is."""

    publish: str
    replay: str


def engine_addresses(host: str, port: int, replay_port: int) -> Addresses:
    """Return what rank 0 is told. On loopback local sockets, named by the ports: TCP would be open to the network."""
    if host in _LOOPBACK:
        return _local(port, replay_port)
    return Addresses(f"tcp://*:{port}", f"tcp://*:{replay_port}")


def subscriber_addresses(host: str, port: int, replay_port: int, rank: int) -> Addresses:
    """Return where one rank is found."""
    if host in _LOOPBACK:
        return _local(port + rank, replay_port + rank)
    host = "127.0.0.1" if host in _ANY else host
    return Addresses(f"tcp://{host}:{port + rank}", f"tcp://{host}:{replay_port + rank}")


def events_argument(host: str, port: int, replay_port: int) -> str:
    """Return the JSON text of `--kv-events-config`."""
    addresses = engine_addresses(host, port, replay_port)
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": addresses.publish,
        "replay_endpoint": addresses.replay,
    }
    return json.dumps(config, separators=(",", ":"))


def subscriptions(name: str, host: str, port: int, replay_port: int, pool: PoolSpec) -> list[str]:
    """Return the proxy's flags to follow one instance, a flag a rank."""
    argv = []
    for rank in range(pool.data_parallel_size if pool.kv_events else 0):
        argv += ["--kv-events", f"{name}={','.join(subscriber_addresses(host, port, replay_port, rank))}"]
    return argv


def _local(port: int, replay_port: int) -> Addresses:
    """Return abstract sockets, which leave no file. Without "tcp" in the name vLLM would refuse further ranks."""
    return Addresses(f"ipc://@pdcluster-kv-tcp:{port}", f"ipc://@pdcluster-kv-tcp:{replay_port}")
