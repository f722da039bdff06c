"""Place a request: decode first, then a prefill that may serve with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from proxy.endpoints import Endpoint, Pools
from proxy.request import InferenceRequest
from proxy.scheduling.base import Picker, Placement, Scorer
from proxy.scheduling.filters import Untried
from proxy.scheduling.scorers import LeastInFlight


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Chooses pairs by one scorer and one picker."""

    pools: Pools
    picker: Picker
    scorer: Scorer = field(default_factory=LeastInFlight)

    def place(self, request: InferenceRequest, tried: Collection[str], aggregated: str | None) -> Placement | None:
        """Return a placement, None where no decode endpoint is ready.

        `aggregated` is the reason why the request must run on decode alone. A decode endpoint that has a usable
        prefill is preferred; only where none has, the placement is decode alone with the reason "no_prefill".
        """
        decodes = self._untried(request, self.pools.ready("decode"), tried)
        if not decodes:
            return None
        if aggregated is not None:
            return Placement(self._choose(request, decodes), None, aggregated)
        if self.pools.excluded:
            decodes = [decode for decode in decodes if self.pools.partners(decode)] or decodes
        decode = self._choose(request, decodes)
        prefills = self.pools.partners(decode)
        if not prefills:
            return Placement(decode, None, "no_prefill")
        return Placement(decode, self._choose(request, self._untried(request, prefills, tried)))

    def _untried(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], tried: Collection[str]
    ) -> Sequence[Endpoint]:
        return Untried(tried).filter(request, endpoints) if tried else endpoints

    def _choose(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Endpoint:
        return self.picker.pick(endpoints, self.scorer.score(request, endpoints))
