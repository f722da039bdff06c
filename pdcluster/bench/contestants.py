"""The routers whose scheduling is compared: ours with each policy that is asked for, vllm-router with each of its."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster.bench.routers import PEER_VERSION, Ports, Router, find_vllm_router, start_ours, start_vllm_router
from pdcluster.errors import UserError

PEER_POLICIES = ("round_robin", "power_of_two", "cache_aware")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A router with one policy: its name in tables, whether it is ours, how it is started, with what said of it."""

    name: str
    ours: bool
    start: Callable[[Ports], Router]
    version: str


def find_contestants(policies: Sequence[str], flags: Sequence[str], peers: Sequence[str]) -> list[Contestant]:
    """Return ours (once with its default where no policy is named), then the peer's; raises `UserError`."""
    unknown = [name for name in peers if name not in PEER_POLICIES]
    if unknown:
        raise UserError(f"--peers {unknown[0]}: vllm-router has {', '.join(PEER_POLICIES)}; or give none")
    if peers:
        find_vllm_router()
    return [*(_ours(policy, flags) for policy in policies or ("",)), *map(_peer, peers)]


def _ours(policy: str, flags: Sequence[str]) -> Contestant:
    given = [*(("--policy", policy) if policy else ()), *flags]
    name = f"pdcluster {policy}".strip()
    return Contestant(
        name, True, lambda ports: start_ours(ports, 1, given), f"pdcluster proxy {' '.join(given)}".strip()
    )


def _peer(policy: str) -> Contestant:
    def start(ports: Ports) -> Router:
        return start_vllm_router(ports, policy)

    return Contestant(policy, False, start, f"vllm-router {PEER_VERSION} --policy {policy}")
