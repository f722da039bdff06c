"""A request inside an engine, and what an engine tells of it."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple


class Work(enum.Enum):
    """What an engine is to do for a request."""

    WHOLE = "whole"  # prefill and decode
    PREFILL = "prefill"  # one token; the KV is kept for a decode elsewhere
    PULL = "pull"  # fetch the KV, then decode


class Told(enum.Enum):
    """What happened to a job."""

    PULLED = "pulled"  # its KV has arrived: whoever held it may free it
    FIRST = "first"  # its first token
    TOKEN = "token"  # noqa: S105 - one more token, told only where every step is
    DONE = "done"  # its last token
    EXPIRED = "expired"  # nobody came for its KV within the lease


class Event(NamedTuple):
    """One thing that happened, in seconds of the caller's clock."""

    at: float
    told: Told
    job: Job


@dataclass(slots=True, eq=False)
class Job:
    """A request: lengths in tokens, `hashes` of the prompt's whole blocks. The rest is kept by the engine.

    `cached` is how many of its prompt's tokens were there already; of a PULL those that were not computed here.
    """

    name: Hashable
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...] = ()
    work: Work = Work.WHOLE

    cached: int = 0
    made: int = 0  # tokens generated when it last joined or left the batch
    computed: int = 0  # tokens of `goal` whose KV is there
    goal: int = 0  # tokens whose KV must be there before it decodes
    plain: int = 0  # its blocks without a hash
    holds: bool = False  # whether it has blocks
    joined: int = -1  # step of the engine at which it joined the batch
    last_step: int = -1  # step after which it leaves the batch
    grows_at: int = -1  # step before which it needs one more block
    pull_s: float = 0.0
    pull_tokens: int = 0
    gone: bool = False  # nobody waits for it any more
