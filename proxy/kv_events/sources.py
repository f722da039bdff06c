"""Where an engine publishes, as the engine itself says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from proxy.config import KvEventSource

SOURCES_PATH = "/kv_event_sources"
_WILDCARDS = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")


def read_sources(body: bytes, engine_url: str) -> Mapping[int, KvEventSource]:
    """Return the sources in an answer to `SOURCES_PATH`, by data-parallel rank; raises `ValueError` for anything else.

    An engine that listens on all addresses is found on the one where its HTTP server is.
    """
    try:
        value = orjson.loads(body)
        items = {int(rank): item for rank, item in value.items()}
    except (orjson.JSONDecodeError, AttributeError, ValueError) as error:
        raise ValueError(f"{SOURCES_PATH}: not a map of ranks") from error
    found = {}
    for rank, item in items.items():
        if not isinstance(item, dict):
            raise ValueError(f"{SOURCES_PATH}: rank {rank} is {item!r}, not a publisher's settings")  # noqa: TRY004 - data
        if item.get("enable_kv_cache_events") and item.get("publisher") == "zmq":
            found[rank] = _source(item, engine_url)
    return found


def _source(item: Mapping[str, Any], engine_url: str) -> KvEventSource:
    publish, replay, topic = item.get("endpoint"), item.get("replay_endpoint"), item.get("topic")
    if not isinstance(publish, str):
        raise ValueError(f"{SOURCES_PATH}: endpoint is {publish!r}, not an address")  # noqa: TRY004 - data, not a call
    return KvEventSource(
        _reachable(publish, engine_url),
        _reachable(replay, engine_url) if isinstance(replay, str) else None,
        topic if isinstance(topic, str) else "",
    )


def _reachable(address: str, engine_url: str) -> str:
    for wildcard in _WILDCARDS:
        if address.startswith(wildcard):
            host = urlsplit(engine_url).hostname or "127.0.0.1"
            return (
                f"tcp://[{host}]:" + address[len(wildcard) :]
                if ":" in host
                else f"tcp://{host}:" + address[len(wildcard) :]
            )
    return address
