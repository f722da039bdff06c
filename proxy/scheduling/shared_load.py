"""What other workers of the proxy have under way on each engine, by the table that all of them share. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.endpoints import Endpoint
from proxy.scheduling.dispatcher import Dispatcher, Pair


class SharedLoad:
    """Keeps the columns of this process true, and tells the dispatcher what stands in the others'.

    An endpoint has a column for its requests in flight, which `Endpoint` keeps, and from `first` on one for the tokens
    that prefill has still to compute. After these stands the number of requests that wait.
    """

    def __init__(self, endpoints: Sequence[Endpoint], dispatcher: Dispatcher, first: int) -> None:
        self._dispatcher = dispatcher
        self._counts = endpoints[0].counts
        self._first = first
        self._waiting = first + len(endpoints)
        self._decodes = [(item, dispatcher.rooms.by_name[item.name]) for item in endpoints if item.role == "decode"]
        self.several = self._counts.rows > 1

    def began(self, pair: Pair) -> None:
        """Count a prefill's tokens."""
        self._counts.mine[self._first + pair.lane.number] += round(pair.tokens)

    def ended(self, pair: Pair) -> None:
        """Count them no more."""
        self._counts.mine[self._first + pair.lane.number] -= round(pair.tokens)

    def waits(self, change: int) -> None:
        """Count requests that wait here: one more, or one less."""
        self._counts.mine[self._waiting] += change

    def look(self) -> None:
        """Read what others have under way."""
        if not self.several:
            return
        counts, lanes = self._counts, self._dispatcher.lanes
        for lane in lanes.by_number.values():
            column = self._first + lane.number
            tokens = counts.total(column) - counts.mine[column]
            lane.others = lanes.seconds(lane, tokens) if tokens > 0 else 0.0
        for endpoint, room in self._decodes:
            room.others = max(0, endpoint.in_flight - counts.mine[endpoint.column])
