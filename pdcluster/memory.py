"""How much host memory engines on a CPU need, and how many fit. Pure.

The constants are proportional set sizes measured on vLLM 0.32's CPU build: API server 0.6 GB, engine core
0.55 GB, and each worker 0.7 GB plus weights and KV cache.
"""

from __future__ import annotations

from pdcluster.engine_args import CPU_KV_BYTES
from pdcluster.errors import PlanError
from pdcluster.inventory import Inventory
from pdcluster.model_facts import ModelFacts
from pdcluster.spec import ClusterSpec, PoolSpec, Role

_ENGINE_BYTES = 1_150_000_000
_WORKER_BYTES = 700_000_000
_RESERVE_BYTES = 1_000_000_000  # the launcher, the proxy and room for the page cache

# Weights on disk may be half as wide as in memory: CPU engines run in float32 by default.
_GB = 1_000_000_000


def instance_bytes(pool: PoolSpec, facts: ModelFacts) -> int:
    """Estimate one CPU instance's memory in bytes."""
    copies = pool.data_parallel_size  # TP and PP ranks share one set of weights between them
    kv_bytes = (pool.kv_cache_memory_bytes or CPU_KV_BYTES) * pool.world_size
    return _ENGINE_BYTES + _WORKER_BYTES * pool.world_size + facts.weight_bytes * copies + kv_bytes


def cluster_bytes(spec: ClusterSpec, facts: ModelFacts) -> int:
    """Estimate the whole cluster's memory on a CPU host in bytes."""
    return _RESERVE_BYTES + sum(pool.replicas * instance_bytes(pool, facts) for _, pool in spec.pools.items())


def refuse_too_little_memory(spec: ClusterSpec, inventory: Inventory, facts: ModelFacts | None) -> None:
    """Raise `PlanError` where CPU engines would not fit in what is available; unknown facts are not checked."""
    if inventory.kind != "cpu" or facts is None:
        return
    needed = cluster_bytes(spec, facts)
    if needed > inventory.available_bytes:
        counts = ", ".join(
            f"{pool.replicas} {role} x {instance_bytes(pool, facts) / _GB:.1f} GB" for role, pool in spec.pools.items()
        )
        raise PlanError(
            f"memory: about {needed / _GB:.1f} GB are needed ({counts}), {inventory.available_bytes / _GB:.1f} GB are "
            "available; start fewer engines, lower kv_cache_memory_bytes, or pass --fit-memory"
        )


def fit_to_memory(spec: ClusterSpec, inventory: Inventory, facts: ModelFacts) -> dict[Role, int]:
    """Return the replicas of each pool that fit, at most those asked for and at least one each.

    The larger pool gives up an instance first, so that the ratio asked for is roughly kept.
    """
    replicas: dict[Role, int] = {role: pool.replicas for role, pool in spec.pools.items()}
    sizes: dict[Role, int] = {role: instance_bytes(pool, facts) for role, pool in spec.pools.items()}
    if inventory.kind != "cpu":
        return replicas
    while sum(replicas[role] * sizes[role] for role in replicas) + _RESERVE_BYTES > inventory.available_bytes:
        largest = max(replicas, key=lambda role: replicas[role])
        if replicas[largest] == 1:
            break
        replicas[largest] -= 1
    return replicas
