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
    "internal_error",  # a bug of ours
]

_TELLING = 8
_CLIENT_ERROR, _SERVER_ERROR, _UNAVAILABLE = 400, 500, 503


def outcome_of(status: int) -> Outcome:
    """Return how a request ended by the status of its answer."""
    if status < _CLIENT_ERROR:
        return "ok"
    if status < _SERVER_ERROR:
        return "client_error"
    return "unavailable" if status == _UNAVAILABLE else "engine_error"


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
    prompt_tokens: int | None = None  # as prefill counted them
    answering: bool = False  # the client has been told a status
    complete: bool = False  # the client has all of a stream, to its last event
    priority: str = "normal"  # of its key: first, normal, last
    path: str = "disaggregated"
    reason: str = ""
    outcome: Outcome = "ok"
    ended: float | None = None

    @property
    def pace(self) -> float | None:
        """The seconds between a stream's events, where there were enough of them to tell."""
        if self.first_byte is None or self.last_byte is None or self.events < _TELLING:
            return None
        return (self.last_byte - self.first_byte) / (self.events - 1)
