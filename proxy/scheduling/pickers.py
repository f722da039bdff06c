"""Pickers: one endpoint out of those that were scored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.endpoints import Endpoint


@dataclass(frozen=True, slots=True)
class BestPicker:
    """Takes the best; among equals each is as likely as the other, so that a burst does not herd."""

    rng: random.Random

    def pick(self, endpoints: Sequence[Endpoint], scores: Sequence[float]) -> Endpoint:
        """Return one of the best-scored endpoints."""
        if len(endpoints) == 1:
            return endpoints[0]
        best = max(scores)
        if scores.count(best) == 1:
            return endpoints[scores.index(best)]
        equal = [item for item, score in zip(endpoints, scores, strict=True) if score == best]
        return equal[int(self.rng.random() * len(equal))]
