"""What the proxy was told: endpoints, limits and policies. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from proxy.api_keys import ApiKeys

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """One engine: the name it has in metrics and logs, its URL without a trailing slash, and its role."""

    name: str
    url: str
    role: Role


class KvEventSource(NamedTuple):
    """Where one data-parallel rank of an engine publishes its KV events, in ZMQ's form.

    Without `replay` a gap cannot be closed, nor silence told from loss.
    """

    publish: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds, apart for each phase; None is no limit.

    `prefill` and `headers` (up to a stream's first event) are long by default: a million tokens take many minutes to
    prefill. `idle` is the time between a stream's pieces, `total` that of the whole request.
    """

    connect: float = 5.0
    prefill: float | None = 3600.0
    headers: float | None = 3600.0
    idle: float | None = 300.0
    total: float | None = None


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What a client may take, in seconds and bytes.

    `head_seconds` for its headers; `body_seconds` for each stretch of its body, which must come at 1 KiB a second;
    `write_seconds` without reading anything of an answer that waits for it.
    """

    head_seconds: float = 10.0
    body_seconds: float = 20.0
    write_seconds: float = 300.0
    head_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """How requests are placed: targets for first tokens and between tokens, and how many may wait for how long.

    `prefix_tokens` is how much of prompts a prefill engine is believed to keep in its cache, `seats` how many sequences
    a decode engine runs at once, None for no bound.
    """

    ttft_ms: float = 500.0
    ttft_per_token_ms: float = 0.25
    tpot_ms: float = 30.0
    queue_size: int = 4096
    queue_seconds: float = 600.0
    prefix_tokens: int = 500_000
    seats: int | None = None


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Everything that `create_app` needs.

    `excluded_pairs` are (prefill, decode) names that must not serve together; `fallback` says what happens when no
    prefill is usable: "decode" serves on decode alone, "none" answers 503. `lease_seconds` is how long prefill engines
    keep the KV of a handoff (vLLM's `kv_lease_duration`): one that has become nearly as old is never sent. `kv_events`
    names the endpoints whose KV events are followed, with their sources by rank; () where the engine is asked for them.
    """

    endpoints: tuple[EndpointConfig, ...]
    excluded_pairs: frozenset[tuple[str, str]] = frozenset()
    connector: str = "nixl"
    fallback: Literal["decode", "none"] = "decode"
    limits: ClientLimits = ClientLimits()
    timeouts: Timeouts = Timeouts()
    health_interval: float = 2.0
    lease_seconds: float = 30.0
    engine_api_key: str | None = field(default=None, repr=False)
    api_keys: ApiKeys | None = None
    cors_origins: tuple[str, ...] = ()
    scheduling: SchedulingConfig = SchedulingConfig()
    kv_events: Mapping[str, tuple[KvEventSource, ...]] = field(default_factory=dict)
