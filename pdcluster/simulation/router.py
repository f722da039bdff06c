"""What a simulated cluster asks of a router, in virtual time. Needs nothing but this: routers elsewhere import nothing.

A router is a class made with one argument, the `Cluster`; the command line names it "module:Class". Each method hears
of one thing that happened and returns decisions (an empty tuple for none), plain tuples:

    ("pair", number, prefill, decode)   prefill there now, then decode there
    ("alone", number, decode)           prefill and decode there now
    ("prefill", number, prefill)        prefill there now; decode is decided later, by
    ("decode", number, decode)          ... this, within the KV lease
    ("refuse", number)                  never serve it
    ("wake", at)                        call `wake` then; asked twice, the earlier time counts

`number` is the request's, `prefill` and `decode` count from 0. A router may decide anything about any request at any
time; it is held to what can be done (`SimulationError`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from pdcluster.errors import UserError
from pdcluster.replay.figures import Targets
from pdcluster.simulation.profile import EngineProfile

Decisions = Iterable[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a router may see it: `output_tokens` is its max_tokens, `blocks` hashes of the prompt's blocks.

    A block has `Cluster.profile.block_tokens` tokens; the prompt's end that fills none has no hash.
    """

    number: int
    arrived: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class Load(NamedTuple):
    """What an engine's /metrics says at this moment."""

    running: int
    waiting: int
    kv_usage: float


class Cluster(Protocol):
    """What a router is made with."""

    prefill: int  # engines
    decode: int
    profile: EngineProfile  # of an engine that is not slowed
    targets: Targets
    seed: int

    def load(self, role: str, index: int) -> Load:
        """Return the load of "prefill" or "decode" engine `index`, as if it were scraped now."""
        ...


class Router(Protocol):
    """Decides what runs where. A router with a method `blocks(now, role, index, stored, removed)` hears of KV events.

    Both are lists, of pairs (parent hash or None, hashes) and of hashes; `role` is "prefill" or "decode".
    """

    def arrive(self, now: float, request: Request) -> Decisions:
        """Hear of a new request."""
        ...

    def prefilled(self, now: float, number: int, cached_tokens: int) -> Decisions:
        """Hear that a prefill is over, and how many tokens of the prompt the engine had."""
        ...

    def first_token(self, now: float, number: int) -> Decisions:
        """Hear that a request's first token was sent."""
        ...

    def finished(self, now: float, number: int) -> Decisions:
        """Hear that a request's last token was sent."""
        ...

    def failed(self, now: float, number: int, reason: str) -> Decisions:
        """Hear that an engine did not serve a request: "too_long" or "lease". It has failed unless placed anew."""
        ...

    def wake(self, now: float) -> Decisions:
        """Hear that the time has come that was asked for."""
        ...


class SimulationError(UserError):
    """A router decided what cannot be done: a request that is not there, or runs; an engine that is none."""


NAMED = {
    "round_robin": "pdcluster.simulation.push:RoundRobin",
    "least_work": "pdcluster.simulation.push:LeastWork",
    "least_work_prefix": "pdcluster.simulation.push:LeastWorkPrefix",
}


def find_router(name: str) -> Callable[[Cluster], Router]:
    """Return the router class of a name in `NAMED`, or of "module:Class". Raises `UserError` where there is none."""
    module, colon, attribute = NAMED.get(name, name).partition(":")
    if not colon or not attribute:
        raise UserError(f"--router {name}: there is {', '.join(NAMED)}; one of your own is given as module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise UserError(f"--router {name}: cannot import {module}: {error}") from None
    if not callable(found):
        raise UserError(f"--router {name}: {module} has no class {attribute}")
    return cast("Callable[[Cluster], Router]", found)
