"""Streams whose events come faster than anybody can read them are read once in a while, not once an event.

Engines make an event in every step of many milliseconds; what comes faster was held up somewhere, or comes from a model
that is tiny. Then other requests, which wait for their first token, go before the rest of such a stream.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

# Events of one stream that come at shorter intervals are gathered, and for no longer than this (seconds).
BURST_S = 0.002


class Held(Protocol):
    """A connection that can be made to wait."""

    def hold(self) -> None:
        """Read nothing more for now."""
        ...

    def go_on(self) -> None:
        """Read again, unless there is another reason not to."""
        ...


class Gathering:
    """Holds connections; one timer lets all of them go on."""

    def __init__(self) -> None:
        self._held: list[Held] = []

    def add(self, connection: Held) -> None:
        """Hold a connection, which is not held already, for `BURST_S` at the most."""
        if not self._held:
            asyncio.get_running_loop().call_later(BURST_S, self._let_go)
        self._held.append(connection)
        connection.hold()

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for connection in held:
            connection.go_on()
