"""Check many pairs: which at once, and what counts against a pair."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from pdcluster.pair_check import Answer, Engine, PairChecker, PairCheckError, PairResult

Rounds = Sequence[Sequence[tuple[Engine, Engine]]]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Runs the pair checks of a cluster.

    `workers` is how many pairs are checked at once (1 on CPU, where engines would starve one another); with
    `enforce` false a differing answer is reported and doesn't count against the pair.
    """

    checker: PairChecker
    workers: int
    enforce: bool

    def check(self, rounds: Rounds) -> list[PairResult]:
        """Check every pair, round by round; within a round no engine appears twice."""
        expected: dict[str, Answer | PairCheckError] = {}
        lock = threading.Lock()
        results: list[PairResult] = []
        with ThreadPoolExecutor(max_workers=self.workers) as pool:
            for pairs in rounds:
                results += pool.map(lambda pair: self._check_one(pair[0], pair[1], expected, lock), pairs)
        return results

    def _check_one(
        self, prefill: Engine, decode: Engine, expected: dict[str, Answer | PairCheckError], lock: threading.Lock
    ) -> PairResult:
        with lock:
            known = expected.get(decode.name)
        if known is None:
            known = self._aggregated(decode)
            with lock:
                expected[decode.name] = known
        if isinstance(known, PairCheckError):
            return PairResult(prefill.name, decode.name, ok=False, detail=str(known))
        result = self.checker.check(prefill, decode, known)
        if result.differs and not self.enforce:
            return replace(result, ok=True, detail=f"not enforced: {result.detail}")
        return result

    def _aggregated(self, decode: Engine) -> Answer | PairCheckError:
        try:
            return self.checker.aggregated(decode)
        except PairCheckError as error:
            return error
