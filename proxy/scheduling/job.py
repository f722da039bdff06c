"""A request as scheduling sees it: how large it is, by when it wants its first token, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.scheduling.prefix_index import Chain

_NOTHING = Chain((), 0)


@dataclass(slots=True, eq=False)
class Job:
    """One request that waits or runs. Times are the clock's seconds, sizes are tokens (the prompt's estimated).

    `deadline` is when its first token is wanted; `firm` says that later is of no use to its client. A lower `priority`
    goes first, as in vLLM. `share` names what is served fairly: an API key, or nothing; one with twice the `weight`
    gets twice the tokens.
    """

    arrived: float
    tokens: float
    deadline: float
    prompt: Chain = _NOTHING
    output: float = 256.0
    priority: int = 0
    share: str = ""
    weight: float = 1.0
    firm: bool = False
    avoid: frozenset[str] = frozenset()  # engines that failed it already
    # The latest moment at which a prefill may begin and still be in time, and whether that has passed.
    latest_start: float = 0.0
    late: bool = False


@dataclass(frozen=True, slots=True)
class Targets:
    """By when a first token is wanted: `base` seconds, and `each` more for every prompt token beyond `free`."""

    base: float = 0.5
    each: float = 0.00025
    free: float = 2000.0

    def first_token(self, tokens: float) -> float:
        """Return the seconds within which the first token of such a prompt is wanted."""
        return self.base + self.each * max(0.0, tokens - self.free)
