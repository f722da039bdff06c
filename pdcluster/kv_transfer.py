"""How a connector reaches vLLM: `--kv-transfer-config` and the side channel's environment. Pure.

Source: vLLM 0.32, `config/kv_transfer.py` and `distributed/kv_transfer/kv_connector/v1/nixl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pdcluster.inventory import Kind
from pdcluster.spec import ClusterSpec, Role

# kv_both is deprecated since vLLM 0.32: a pool says which half it plays.
_KV_ROLE: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

# Microseconds between polls of NIXL's progress thread on CPU hosts; unset, it spins a core per engine.
CPU_POLL_MICROSECONDS = 2000

# NIXL's own transfer threads, of which vLLM asks for four: over TCP on two cores a transfer through them hung for
# seconds, now and then for the whole lease. Without them the progress thread moves the bytes (3 to 20 ms).
CPU_NIXL_THREADS = 0


# vLLM's own default, and one for CPU hosts: there engines starve one another, decode's heartbeats come late, and KV
# that is freed too early is not refused but answered wrongly.
_LEASE_SECONDS = 30
_CPU_LEASE_SECONDS = 120


def lease_seconds(spec: ClusterSpec, kind: Kind) -> int:
    """Return how long prefill keeps the KV of a request for decode to fetch it."""
    return spec.kv_lease_duration or (_CPU_LEASE_SECONDS if kind == "cpu" else _LEASE_SECONDS)


def nixl_config(spec: ClusterSpec, role: Role, kind: Kind) -> dict[str, Any]:
    """Return the NIXL half of `--kv-transfer-config` for one role; the policy is the same on both pools."""
    extra: dict[str, Any] = {"kv_lease_duration": lease_seconds(spec, kind)}
    if kind == "cpu":
        extra["num_threads"] = CPU_NIXL_THREADS
    return {
        "kv_connector": "NixlConnector",
        "kv_role": _KV_ROLE[role],
        "kv_buffer_device": "cpu" if kind == "cpu" else "cuda",
        "kv_load_failure_policy": spec.kv_load_failure_policy,
        "kv_connector_extra_config": extra,
    }


CONNECTORS: Mapping[str, Callable[[ClusterSpec, Role, Kind], dict[str, Any]]] = {"nixl": nixl_config}


def transfer_argument(spec: ClusterSpec, role: Role, kind: Kind) -> str:
    """Return the JSON text of `--kv-transfer-config`, the same text for the same spec."""
    return json.dumps(CONNECTORS[spec.connector](spec, role, kind), separators=(",", ":"))


def side_channel_environment(host: str, port: int, kind: Kind) -> dict[str, str]:
    """Return what NIXL reads from the environment.

    `host` must be reachable from the other pool (vLLM's own default is localhost); with data parallelism
    rank r listens on `port` + r.
    """
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    if kind == "cpu":
        environment |= {"UCX_TLS": "tcp", "PDCLUSTER_NIXL_POLL_US": str(CPU_POLL_MICROSECONDS)}
    return environment
