"""What is noted of one request while it runs; metrics are made of it once, at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal[
    "ok",
    "client_error",  # 4xx of ours or of an engine
    "client_cancelled",
    "engine_error",  # 5xx answered before the first byte
    "upstream_aborted",  # the stream broke after the first byte
    "unavailable",  # nothing could take it
]


@dataclass(slots=True)
class Trace:
    """Times are the clock's seconds; None is what did not happen."""

    route: str
    began: float
    placed: float | None = None
    prefill_began: float | None = None
    prefill_ended: float | None = None
    first_byte: float | None = None
    last_byte: float | None = None
    events: int = 0
    path: str = "disaggregated"
    reason: str = ""
    outcome: Outcome = "ok"
    ended: float | None = None
