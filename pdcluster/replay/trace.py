"""Request traces: JSON lines, packed or not, into requests that are due at a time of the run.

One JSON object a line, the form in which Mooncake's traces were published: `timestamp` (milliseconds since the start),
`input_length` and `output_length` (tokens), `hash_ids` (one id for each 512 tokens of the prompt; equal ids at equal
positions are an equal prefix). Other keys are left alone.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from pdcluster.errors import UserError

BLOCK_TOKENS = 512
_GZIP = b"\x1f\x8b"
_MS = 1000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: seconds since its start, lengths in tokens, an id for each block of the prompt."""

    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a trace that is replayed, in its seconds: `begin` is in it, `end` is not; None is to the last."""

    begin: float = 0.0
    end: float | None = None

    def holds(self, at: float) -> bool:
        """Tell whether a time lies in it."""
        return at >= self.begin and (self.end is None or at < self.end)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a trace becomes a run.

    Times are divided by `speed`; outputs are cut at `max_output`; requests with longer inputs than `max_input` are left
    out; a block has `block_tokens` tokens in place of 512, inputs in proportion (for engines with a short context).
    `seed` shuffles requests of one timestamp (a trace does not say which of them came first), 0 keeps their order;
    `spread` moves each by a random part of so many of the trace's seconds (published timestamps are coarse: Mooncake's
    lie three seconds apart).
    """

    speed: float = 1.0
    max_output: int | None = None
    max_input: int | None = None
    block_tokens: int = BLOCK_TOKENS
    spread: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it is due, in seconds since the start of the run; lengths are those that are asked for."""

    due: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read: the requests of the window, in order of time, and how many the file has in all."""

    name: str
    window: Window
    requests: tuple[TraceRequest, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The arrivals of a run in order, how many seconds they last, and how many requests were left out as too long."""

    arrivals: tuple[Arrival, ...]
    seconds: float
    dropped: int


def read_trace(path: Path, window: Window = Window()) -> Trace:
    """Read the requests of a window; memory is bounded by the window. Raises `UserError` with file and line."""
    requests: list[TraceRequest] = []
    total = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    request = _parsed(line, f"{path} line {number}")
                    total += 1
                    if window.holds(request.at):
                        requests.append(request)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read as a trace: {reason}") from None
    if not requests:
        end = "the end" if window.end is None else f"{window.end:g}"
        raise UserError(f"{path}: none of its {total} requests lies from second {window.begin:g} to {end}")
    requests.sort(key=lambda item: item.at)
    return Trace(path.name, window, tuple(requests), total)


def shaped(trace: Trace, shape: Shape) -> Schedule:
    """Return when each request is due, and what it asks for."""
    rng = random.Random(f"{shape.seed} arrivals")  # noqa: S311 - a reproducible choice, no secret
    begin = trace.window.begin
    kept = [(item, _scaled(item.input_tokens, shape)) for item in trace.requests]
    arrivals = [
        (
            (request.at - begin + rng.random() * shape.spread) / shape.speed,
            rng.random() if shape.seed else 0.0,
            Arrival(0.0, tokens, min(request.output_tokens, shape.max_output or request.output_tokens), request.blocks),
        )
        for request, tokens in kept
        if shape.max_input is None or tokens <= shape.max_input
    ]
    arrivals.sort(key=lambda item: item[:2])
    if not arrivals:
        raise UserError(f"{trace.name}: all {len(kept)} requests are longer than {shape.max_input} tokens; allow more")
    end = trace.window.end if trace.window.end is not None else trace.requests[-1].at
    made = tuple(Arrival(due, item.input_tokens, item.output_tokens, item.blocks) for due, _, item in arrivals)
    return Schedule(made, max((end - begin) / shape.speed, made[-1].due), len(kept) - len(made))


def _scaled(tokens: int, shape: Shape) -> int:
    return max(1, tokens * shape.block_tokens // BLOCK_TOKENS)


def _opened(path: Path) -> IO[bytes]:
    """Open a file, unpacking what is packed: the first bytes say so, whatever its name."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    if packed:
        return gzip.open(path, "rb")  # type: ignore[return-value] # it reads alike
    return path.open("rb")


def _parsed(line: bytes, where: str) -> TraceRequest:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be a JSON object with timestamp, input_length, output_length and hash_ids")
    at = row.get("timestamp")
    if not isinstance(at, int | float) or isinstance(at, bool) or at < 0:
        raise UserError(f"{where}: timestamp must be milliseconds since the start, is {at!r}")
    lengths = list(_lengths(row, where))
    blocks = row.get("hash_ids")
    if not isinstance(blocks, list) or not all(isinstance(item, int) for item in blocks):
        raise UserError(f"{where}: hash_ids must be a list of whole numbers")
    if len(blocks) * BLOCK_TOKENS < lengths[0]:
        needed = -(-lengths[0] // BLOCK_TOKENS)
        raise UserError(f"{where}: {len(blocks)} hash_ids are too few for {lengths[0]} tokens, which need {needed}")
    return TraceRequest(at / _MS, lengths[0], lengths[1], tuple(blocks))


def _lengths(row: dict[str, Any], where: str) -> Iterator[int]:
    for key in ("input_length", "output_length"):
        value = row.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{where}: {key} must be a whole number of tokens, 1 or more, is {value!r}")
        yield value
