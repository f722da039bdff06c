"""What one node of a multi-node instance is told besides its pool's settings: its rank, and where the others are. Pure.

Source: vLLM 0.32, `entrypoints/cli/serve.py`. Ranks of one replica on several nodes have one server, on the first node;
the others are headless. Data-parallel ranks have a server on every node, which balances its own ranks (hybrid).
"""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster.spec import PoolSpec


def node_arguments(pool: PoolSpec, node: int, head: str) -> Iterator[tuple[str, ...]]:
    """Yield the flags of node `node` (from 0); nothing where one node is all of an instance."""
    if pool.nodes == 1:
        return
    if pool.data_parallel_size > 1:
        local = pool.data_parallel_size // pool.nodes
        yield ("--data-parallel-size-local", str(local))
        yield ("--data-parallel-start-rank", str(node * local))
        yield ("--data-parallel-address", head)
        yield ("--data-parallel-hybrid-lb",)
        return
    yield ("--nnodes", str(pool.nodes))
    yield ("--node-rank", str(node))
    yield ("--master-addr", head)
    if node > 0:
        yield ("--headless",)


def serves(pool: PoolSpec, node: int) -> bool:
    """Tell whether a node answers HTTP."""
    return node == 0 or pool.data_parallel_size > 1
