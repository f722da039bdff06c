"""Where a request runs."""

from __future__ import annotations

from typing import NamedTuple

from proxy.endpoints import Endpoint
from proxy.scheduling.dispatcher import Pair
from proxy.scheduling.seats import Room


class Placement(NamedTuple):
    """A pair, or decode alone with the reason why.

    `pair`, `room` and `output` (tokens) are for the dispatcher, which is told how it went.
    """

    decode: Endpoint
    prefill: Endpoint | None
    reason: str = ""
    pair: Pair | None = None
    room: Room | None = None
    output: float = 0.0
