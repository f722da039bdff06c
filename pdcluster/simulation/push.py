"""Reference routers that push: every request goes to its engines when it arrives, as vllm-router and its like do.

Where there are no prefill engines, decode engines serve alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster.simulation.prefix_cache import PrefixCache
from pdcluster.simulation.router import Cluster, Decisions, Request


class RoundRobin:
    """Each pool in turn."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def arrive(self, now: float, request: Request) -> Decisions:  # noqa: ARG002
        """Place it on the next engine of each pool."""
        number, decode = request.number, request.number % self._cluster.decode
        if not self._cluster.prefill:
            return (("alone", number, decode),)
        return (("pair", number, number % self._cluster.prefill, decode),)

    def prefilled(self, now: float, number: int, cached_tokens: int) -> Decisions:  # noqa: ARG002
        """Do nothing."""
        return ()

    def first_token(self, now: float, number: int) -> Decisions:  # noqa: ARG002
        """Do nothing."""
        return ()

    def finished(self, now: float, number: int) -> Decisions:  # noqa: ARG002
        """Do nothing."""
        return ()

    def failed(self, now: float, number: int, reason: str) -> Decisions:  # noqa: ARG002
        """Do nothing: it has failed."""
        return ()

    def wake(self, now: float) -> Decisions:  # noqa: ARG002
        """Do nothing."""
        return ()


class LeastWork(RoundRobin):
    """Prefill with the fewest tokens sent and not prefilled yet, decode with the fewest requests; ties in turn."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._tokens = [0] * max(1, cluster.prefill)
        self._requests = [0] * cluster.decode
        self._placed: dict[int, tuple[int, int, int]] = {}  # number -> prefill, decode, tokens

    def arrive(self, now: float, request: Request) -> Decisions:  # noqa: ARG002
        """Place it where the least is to be done."""
        decode = _least(self._requests, request.number)
        self._requests[decode] += 1
        if not self._cluster.prefill:
            self._placed[request.number] = (0, decode, 0)
            return (("alone", request.number, decode),)
        prefill, tokens = self._best_prefill(request)
        self._tokens[prefill] += tokens
        self._placed[request.number] = (prefill, decode, tokens)
        return (("pair", request.number, prefill, decode),)

    def prefilled(self, now: float, number: int, cached_tokens: int) -> Decisions:  # noqa: ARG002
        """Count what is left."""
        prefill, decode, tokens = self._placed[number]
        self._tokens[prefill] -= tokens
        self._placed[number] = (prefill, decode, 0)
        return ()

    def finished(self, now: float, number: int) -> Decisions:  # noqa: ARG002
        """Count who is left."""
        prefill, decode, tokens = self._placed.pop(number)
        self._tokens[prefill] -= tokens
        self._requests[decode] -= 1
        return ()

    def failed(self, now: float, number: int, reason: str) -> Decisions:  # noqa: ARG002
        """Give its places back: it has failed."""
        return self.finished(now, number)

    def _best_prefill(self, request: Request) -> tuple[int, int]:
        """Return the engine, and how many tokens it will compute."""
        return _least(self._tokens, request.number), request.prompt_tokens


class LeastWorkPrefix(LeastWork):
    """As `LeastWork`, without the tokens that an engine has, as far as can be told from what it was sent."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        profile = cluster.profile
        kept = profile.cache_blocks if profile.cache_blocks is not None else profile.kv_blocks
        self._block_tokens = profile.block_tokens
        self._sent = [PrefixCache(None, kept) for _ in range(cluster.prefill)]

    def _best_prefill(self, request: Request) -> tuple[int, int]:
        work = [
            request.prompt_tokens - min(sent.hits(request.blocks) * self._block_tokens, request.prompt_tokens - 1)
            for sent in self._sent
        ]
        best = _least([queued + own for queued, own in zip(self._tokens, work, strict=True)], request.number)
        self._sent[best].acquire(request.blocks, 0)
        self._sent[best].release(request.blocks, 0)
        return best, work[best]


def _least(values: Sequence[int], turn: int) -> int:
    """Return where the least value is; of several the next in turn."""
    least, count = min(values), len(values)
    return next(index % count for index in range(turn, turn + count) if values[index % count] == least)
